"""Text in and out: what counts as a prompt, one BOS, and streams that never take back a character."""

import json
import random

import pytest

from spec.text import TextStream, encode, load_tokenizer

PIECES = [
    "",
    "<s>",
    "a",
    "b",
    "c",
    " ",
    "\n",
    "é",
    "日本",
    b"\xf0\x9f",
    b"\x8e\x89",
    b"\xf0",
    b"\x9f\x98",
    b"\x80",
    b"\xe6\x97",
]
SPECIAL = 1


class Bytes:
    """A byte-level tokenizer: token i is PIECES[i], which may be a part of a character; token 1 is special."""

    chat_template = None

    def decode(self, ids, skip_special_tokens=True):
        raw = (PIECES[i] for i in ids if not (skip_special_tokens and i == SPECIAL))
        return b"".join(p if isinstance(p, bytes) else p.encode() for p in raw).decode("utf-8", errors="replace")

    def __call__(self, text):
        return {"input_ids": [PIECES.index(c) for c in text if c in PIECES]}


def ids_of(*pieces):
    return [PIECES.index(p) for p in pieces]


def stream(ids, stop=(), tokenizer=None, sizes=None):
    """Push ids in chunks; returns the stream and the pieces, the last one from `finish`."""
    out, pieces, place, sizes = TextStream(tokenizer or Bytes(), stop), [], 0, iter(sizes or [1] * len(ids))
    while place < len(ids) and not out.stopped:
        size = next(sizes)
        pieces.append(out.push(ids[place : place + size]))
        place += size
    return out, [*pieces, out.finish()]


EMOJI = ids_of("a", b"\xf0\x9f", b"\x8e\x89", "b")


@pytest.mark.parametrize(
    ("ids", "stop", "pieces"),
    [
        (ids_of("a", "é", "日本"), (), ["a", "é", "日本", ""]),
        (EMOJI, (), ["a", "", "🎉", "b", ""]),
        (ids_of(b"\xf0", b"\x9f\x98", b"\x80"), (), ["", "", "😀", ""]),
        (ids_of("a", b"\xf0\x9f"), (), ["a", "", "\ufffd"]),  # never completed: shown at the end as it is
        (ids_of("a", b"\xf0\x9f", "b"), (), ["a", "", "\ufffdb", ""]),
        (ids_of("a", "<s>", "b", "<s>"), (), ["a", "", "b", "", ""]),
        (ids_of("a", "b", "c"), ["bc"], ["a", "", "", ""]),  # over a border of tokens
        (ids_of("a", "b", "a"), ["bc"], ["a", "", "ba", ""]),  # was the beginning of a stop string after all not
        (ids_of("a", "b"), ["bc"], ["a", "", "b"]),  # released at the end
        (ids_of("a", "b", "b", "c"), ["bc"], ["a", "", "b", "", ""]),
        (ids_of("a", "b", "a", "b", "c"), ["abc"], ["", "", "ab", "", "", ""]),
        (ids_of("a", "b", "c", "a"), ["ca", "b"], ["a", "", ""]),
        (ids_of("b", "c", "a"), ["ba", "ca", "cab"], ["", "b", "", ""]),
        (ids_of("a", "b"), ["a"], ["", ""]),  # at the very start
        (EMOJI, ["🎉"], ["a", "", "", ""]),
        (ids_of("a", b"\xf0\x9f", b"\x8e\x89", "b"), ["🎉b"], ["a", "", "", "", ""]),
        (ids_of("日本", "a"), ["本"], ["日", ""]),
        (ids_of("a", b"\xf0\x9f"), ["\ufffd"], ["a", "", ""]),  # found only by finish
        (ids_of("a", "<s>", "b"), ["ab"], ["", "", "", ""]),
        (ids_of("a", "\n", "\n", "b"), ["\n\n"], ["a", "", "", ""]),
    ],
)
def test_stream_pieces(ids, stop, pieces):
    out, found = stream(ids, stop)
    assert found == pieces
    whole = Bytes().decode(ids)
    places = [whole.index(s) for s in stop if s in whole]
    assert out.text == "".join(found) == whole[: min(places, default=len(whole))]
    assert out.stopped == bool(places)
    assert out.ids == ids[: len(out.ids)]


def test_tokens_behind_a_stop_string_do_not_count():
    out, _ = stream(ids_of("a", "b", "c", "a", "b"), ["bc"], sizes=[5])
    assert (out.ids, out.text, out.stopped) == (ids_of("a", "b", "c"), "a", True)


def check_random_streams(tokenizer, units, cases, seed):
    """Any tokens in any chunks, with and without stop strings cut out of their text: the text of one whole decode."""
    rng = random.Random(seed)
    for _ in range(cases):
        ids = [token for unit in rng.choices(units, k=rng.randrange(1, 24)) for token in unit]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        stops = []
        for _ in range(rng.randrange(3) if whole else 0):
            start = rng.randrange(len(whole))
            stops.append(whole[start : start + rng.randrange(1, 5)])
        sizes = [rng.randrange(1, 6) for _ in ids]
        out, pieces = stream(ids, stops, tokenizer, sizes)
        assert "".join(pieces) == out.text == stream(ids, stops, tokenizer)[0].text == whole[: len(out.text)]
        assert out.stopped == bool(stops)
        starts = {whole.index(s) for s in stops} or {len(whole)}  # of two that overlap, the one that ends first counts
        assert len(out.text) in (starts if len(stops) > 1 else {min(starts)}), (ids, stops, sizes)


def test_random_streams():
    check_random_streams(Bytes(), [[i] for i in range(1, len(PIECES))], 600, 0)


def like_llama2():
    """Llama 2's decoder, its vocabulary, its words and an emoji's bytes: a text's first space is dropped, unknown
    characters are runs of byte tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    words, emoji = ["▁", "▁a", "a", "b", "▁the", "é", "日", "▁▁", "\n"], [f"<0x{b:02X}>" for b in "🎉".encode()]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", *emoji, *words])}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    steps = tokenizers.decoders
    spaces = steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)
    made.decoder = steps.Sequence(list(spaces))
    made.add_special_tokens(["<s>"])
    return made, vocabulary, words, emoji


def test_random_streams_of_a_sentencepiece_tokenizer():
    made, vocabulary, words, emoji = like_llama2()
    units = [[vocabulary[word]] for word in ("<s>", *words)] + [[vocabulary[byte] for byte in emoji]]
    check_random_streams(made, units, 300, 2)


def test_chunks_make_no_difference_where_bytes_are_invalid():
    """A stray byte spoils the whole run of bytes that it ends, an emoji in it as well: not if that was shown before."""
    made, vocabulary, words, emoji = like_llama2()
    whole, stray = [vocabulary[byte] for byte in emoji], vocabulary[emoji[0]]
    ids = [vocabulary["a"], *whole, stray, vocabulary["b"]]
    out, _ = stream(ids, ["🎉"], made, [len(ids)])
    assert (out.text, out.ids, out.stopped) == ("a", ids[:5], True)
    rng, units = random.Random(5), [[vocabulary[word]] for word in words] + [whole, [stray], whole[1:3]]
    for _ in range(400):
        ids = [token for unit in rng.choices(units, k=rng.randrange(1, 16)) for token in unit]
        stop = rng.choice([(), ("🎉",), ("ab",), ("\ufffd",)])
        out, _ = stream(ids, stop, made, [rng.randrange(1, 9) for _ in ids])
        alone, _ = stream(ids, stop, made)
        assert (out.text, out.ids, out.stopped) == (alone.text, alone.ids, alone.stopped), (ids, stop)


def test_no_tokenizer_gives_no_text():
    out = TextStream(None)
    assert (out.push([3, 4]), out.finish(), out.text, out.ids) == ("", "", "", [3, 4])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ("xyz", "the tokenizer makes no token of it"),
        ([3, 15], "token id 15 is outside the target's vocabulary of 15"),
        ([-1], "token id -1 is outside"),
        ([True, 2], "a string, a list of token ids, or a list of"),
        ([1.0], "a string, a list of token ids, or a list of"),
        ([2, {"role": "user", "content": "a"}], "a string, a list of token ids, or a list of"),
        (["a", "b"], "a string, a list of token ids, or a list of"),
        (7, "not a prompt: 7"),
        (None, "not a prompt: None"),
        ([{"role": "user", "content": "a"}], "no chat template"),
    ],
)
def test_prompts_that_are_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        encode(prompt, Bytes(), len(PIECES))


def test_prompts_without_a_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert encode((3, 4), None, 5) == [3, 4]
    with pytest.raises(ValueError, match="no tokenizer: give prompts as token ids"):
        encode("a", None, 5)
    with pytest.raises(ValueError, match="no chat template"):
        encode([{"role": "user", "content": "a"}], None, 5)


@pytest.fixture(scope="module")
def bos_tokenizer(tmp_path_factory):
    """A tokenizer that puts <s> before every text, with a chat template that writes <s> too."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "<s>": 1, "<user>": 2, "<assistant>": 3, "hello": 4, "world": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "<user>", "<assistant>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return load_tokenizer(folder)


def test_one_bos(bos_tokenizer):
    assert encode("hello world", bos_tokenizer, 6) == [1, 4, 5]
    assert encode([{"role": "user", "content": "hello"}], bos_tokenizer, 6) == [1, 2, 4, 3]
    with pytest.raises(ValueError, match="token id 5 is outside"):
        encode("hello world", bos_tokenizer, 5)


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "a"}, {"role": "user", "content": 3}, {}])
def test_messages_that_are_refused(bos_tokenizer, message):
    with pytest.raises(ValueError, match="a chat message needs 'role' and 'content' strings"):
        encode([message], bos_tokenizer, 6)


@pytest.fixture(scope="module")
def demo():
    """The demo model's tokenizer, if the model is prepared or can be."""
    from modelkit.demo import prepare_demo_model

    try:
        return load_tokenizer(prepare_demo_model())
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"the demo model cannot be prepared: {error}")


def test_demo_chat_prompt(demo):
    ids = encode([{"role": "user", "content": "Hi"}], demo, 49152)
    text = demo.decode(ids)
    assert text.startswith("<|im_start|>system\n") and text.endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.count("<|im_start|>") == 3
    assert demo.decode(encode("Hi there", demo, 49152)) == "Hi there"


@pytest.mark.parametrize("text", ["naïve 日本語, 🎉 and 👩‍👩‍👧!", "one two\n\nthree  four", " leading and trailing "])
def test_demo_streams(demo, text):
    ids = encode(text, demo, 49152)
    out, pieces = stream([*ids[:2], *demo.all_special_ids[:1], *ids[2:]], (), demo)
    assert "".join(pieces) == out.text == text
    assert not any("\ufffd" in piece for piece in pieces)
    for stop in (text[3:6], text[-4:-1], text[:1]):
        out, pieces = stream(ids, [stop], demo, [3] * len(ids))
        assert "".join(pieces) == out.text == text[: text.index(stop)] and out.stopped


def test_demo_random_streams(demo):
    check_random_streams(demo, [[i] for i in range(49152)], 150, 1)


@pytest.mark.parametrize("stop", [(), ("cc",)])
def test_a_rounds_tokens_cost_no_more_than_one(stop, monkeypatch):
    """While the next round runs there is a millisecond for all of them."""
    calls, tokenizer = [], Bytes()

    def decode(*args, **settings):
        calls.append(args)
        return Bytes.decode(tokenizer, *args, **settings)

    monkeypatch.setattr(tokenizer, "decode", decode)
    out = TextStream(tokenizer, stop)
    assert out.push(ids_of("a", "b") * 8) == "ab" * 8
    assert len(calls) == 2
