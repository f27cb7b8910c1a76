"""The target writes its own training text: answers, and the user's turns too where no prompts are given.

Document i depends on i and the recipe alone (prompt, temperatures and seeds are derived from it), so a run that is
interrupted and resumed writes what one run writes. Everything is decoded plainly by the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from modelkit.compile import Step, forget

from ..config import GenerateConfig
from ..engine import Engine
from ..prompts import as_chat, encode_all, read_prompts
from ..requests import Completion, Settings
from ..text import encode
from .config import DataConfig, TrainingConfig
from .loops import cut_loop
from .store import Document, Store

USER, ANSWER = 0, 1  # turns, as far as seeds are concerned
PLACEHOLDER = "\u2402"


class WriterEngine(Engine):
    """An engine that compiles one round for any number of active slots and any mix of temperatures.

    Writing is one long run with full slots; graphs for its tail would take longer to compile than the tail itself.
    """

    def compiled_step(self, rows: int, plain: bool = False, greedy: bool | None = None) -> Step:
        """See `Engine.compiled_step`."""
        return super().compiled_step(self.state.slots, plain, False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """The chat template around one user turn, as token ids: what comes before its text, and behind."""

    before: list[int]
    behind: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        """Read it off a rendered conversation.

        Raises:
            ValueError: no tokenizer, no chat template, or one that does not show the user's text once.
        """
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ValueError("the target has no chat template to make up user turns with: give [data] prompts")
        messages = [{"role": "user", "content": PLACEHOLDER}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        parts = text.split(PLACEHOLDER)
        if len(parts) != 2 or not parts[0] or not parts[1]:
            raise ValueError("the chat template does not show a user turn's text once: give [data] prompts")
        before, behind = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)
        return cls(before=before, behind=behind)


class Writer:
    """Makes documents by number.

    Args:
        config: the run.
        progress: called with lines about what takes long.

    Raises:
        ValueError: the prompts cannot be read, or the target cannot do without them.
    """

    def __init__(self, config: TrainingConfig, progress: Callable[[str], None] | None = None) -> None:
        self.data = config.data
        self.engine = WriterEngine(engine_config(config, config.data), progress)
        tokenizer, vocabulary = self.engine.tokenizer, self.engine.target.config.vocab_size
        self.vocabulary, self.tokenizer = vocabulary, tokenizer
        self.template: Template | None = None
        self.prompts: list[list[int]] = []
        if self.data.prompts is None:
            self.template = Template.of(tokenizer)
            if self.room < 1:
                raise ValueError(f"max_prompt_tokens = {self.data.max_prompt_tokens}: the chat template takes them all")
        else:
            named = read_prompts([], self.data.prompts)
            if tokenizer is not None and tokenizer.chat_template:
                named = as_chat(named)
            encoded = encode_all(named, tokenizer, vocabulary)
            self.prompts = [ids for ids in encoded if len(ids) <= self.data.max_prompt_tokens]
            if not self.prompts:
                raise ValueError(
                    f"{self.data.prompts}: every prompt is longer than {self.data.max_prompt_tokens} tokens"
                )
        # Text of every token would cost the host more than the tokens cost the model.
        self.engine.tokenizer = None

    @property
    def room(self) -> int:
        """Tokens a made-up user turn may have."""
        assert self.template is not None
        return self.data.max_prompt_tokens - len(self.template.before) - len(self.template.behind)

    def recipe(self) -> dict[str, Any]:
        """What decides a document besides its number, for the manifest."""
        names = (
            "prompt_temperatures", "temperatures", "max_prompt_tokens", "max_new_tokens", "loop_rounds",
            "shard_documents", "seed",
        )  # fmt: skip
        recipe = {name: getattr(self.data, name) for name in names} | {"dtype": str(self.engine.target.dtype)}
        prompts = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest() if self.prompts else None
        whole: dict[str, Any] = json.loads(json.dumps(recipe | {"prompts": prompts}))
        return whole

    def _seed(self, index: int, turn: int) -> int:
        return (self.data.seed << 32) + 2 * index + turn

    def _answer_temperature(self, index: int) -> float:
        turn = index // len(self.prompts) if self.prompts else index
        return self.data.temperatures[turn % len(self.data.temperatures)]

    def documents(self, indices: Sequence[int], progress: Callable[[int], None]) -> list[Document]:
        """The documents of some numbers, in order; those that come to nothing are left out.

        Args:
            indices: numbers.
            progress: called with the number of tokens of each turn that is finished.
        """
        prompts = self._prompts(indices, progress)
        asked = {index: prompt for index, prompt in prompts.items() if self._is_new(index)}
        settings = [
            Settings(
                temperature=self._answer_temperature(index), seed=self._seed(index, ANSWER),
                max_new_tokens=self.data.max_new_tokens,
            )
            for index in asked
        ]  # fmt: skip
        answers = self._run(list(asked.values()), settings, progress)
        return [
            Document(prompt=prompt, answer=self._without_loop(answer.token_ids))
            for prompt, answer in zip(asked.values(), answers, strict=True)
        ]

    def _without_loop(self, tokens: list[int]) -> list[int]:
        return tokens if self.data.loop_rounds is None else cut_loop(tokens, self.data.loop_rounds)

    def _is_new(self, index: int) -> bool:
        """Not the second greedy answer to a prompt of the file."""
        rounds = len(self.prompts) * len(self.data.temperatures)
        return not self.prompts or index < rounds or self._answer_temperature(index) > 0

    def _prompts(self, indices: Sequence[int], progress: Callable[[int], None]) -> dict[int, list[int]]:
        if self.template is None:
            return {index: self.prompts[index % len(self.prompts)] for index in indices}
        data, tokenizer = self.data, self.tokenizer
        assert tokenizer is not None, "the template is the tokenizer's"
        settings = [
            Settings(
                # Another number than the answers' walks through the temperatures, so that all pairs come up.
                temperature=data.prompt_temperatures[index // len(data.temperatures) % len(data.prompt_temperatures)],
                seed=self._seed(index, USER), max_new_tokens=self.room,
            )
            for index in indices
        ]  # fmt: skip
        turns = self._run([self.template.before] * len(indices), settings, progress)
        found = {}
        for index, turn in zip(indices, turns, strict=True):
            text = tokenizer.decode(turn.token_ids, skip_special_tokens=True).strip()
            if turn.finish_reason == "stop" and text and "\ufffd" not in text:  # a turn cut short is no user's turn
                # Encoded as serving would encode it, which need not be how it was sampled.
                ids = encode([{"role": "user", "content": text}], tokenizer, self.vocabulary)
                if len(ids) <= data.max_prompt_tokens:
                    found[index] = ids
        return found

    def _run(
        self, prompts: list[list[int]], settings: list[Settings], progress: Callable[[int], None]
    ) -> list[Completion]:
        if not prompts:
            return []
        done: dict[int, Completion] = {}
        for index, completion in self.engine.completions(prompts, settings, plain=True):
            done[index] = completion
            progress(len(completion.token_ids))
        return [done[index] for index in range(len(prompts))]


def engine_config(config: TrainingConfig, data: DataConfig) -> GenerateConfig:
    """The engine that writes; its drafter is never asked."""
    return GenerateConfig.from_tables(
        {
            "target": dataclasses.asdict(config.target),
            "draft": {"name": "ngram", "block_size": 2},
            "tree": {"name": "chain"},
            "sampling": {"name": "gumbel"},
            "compile": dataclasses.asdict(config.compile),
            "engine": {
                "slots": data.slots,
                "max_model_len": data.max_prompt_tokens + data.max_new_tokens,
                "prefill_chunk": data.prefill_chunk,
            },
        }
    )


def shards(data: DataConfig, done: int) -> Iterator[list[int]]:
    """Document numbers of the shards still to be written."""
    for start in range(done * data.shard_documents, data.documents, data.shard_documents):
        yield list(range(start, start + data.shard_documents))


def write_data(config: TrainingConfig, store: Store, say: Callable[[str], None]) -> None:
    """Write the shards that are missing.

    Args:
        config: the run.
        store: of the data folder.
        say: called with lines of text.

    Raises:
        ValueError: the shards there were made another way, or all documents of a shard came to nothing.
    """
    from tqdm import tqdm

    missing = list(shards(config.data, store.shards))
    if not missing:
        return
    writer = Writer(config, say)
    store.use_recipe(writer.recipe())
    there = store.shards * config.data.shard_documents
    with tqdm(total=config.data.documents, initial=there, unit="document", disable=None) as bar:
        tokens = 0

        def count(new: int) -> None:
            nonlocal tokens
            tokens += new
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9):.0f} tokens/s")

        for indices in missing:
            documents = writer.documents(indices, count)
            if not documents:
                raise ValueError(
                    f"documents {indices[0]} to {indices[-1]} all came to nothing: no user turn ended within "
                    f"max_prompt_tokens = {config.data.max_prompt_tokens}"
                )
            store.add(documents)
            bar.update(len(indices))
    del writer
    forget()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
