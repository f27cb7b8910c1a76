"""The target writes its own training text: answers, and the user's turns too where no prompts are given.

Document i depends on i and the recipe alone (prompt, temperatures and seeds are derived from it), so a run that is
interrupted and resumed, or shared out over processes, writes what one run writes. Everything is decoded plainly by the
engine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from modelkit.compile import Step, forget
from parallel.beside import Beside
from parallel.process import rank, started
from sampling import Acceptance, Draws

from ..config import GenerateConfig
from ..engine import Engine
from ..prompts import as_chat, encode_all, read_prompts
from ..requests import Completion, Request, Settings
from ..text import encode
from ..types import Verified
from .config import DataConfig, TrainingConfig
from .loops import cut_loop
from .store import Document, Store

USER, ANSWER = 0, 1  # turns, as far as seeds are concerned
PLACEHOLDER = "\u2402"


class WriterEngine(Engine):
    """An engine for one long run of plain decoding with full slots.

    It compiles one round for any number of active slots and any mix of temperatures: graphs for the run's tail would
    take longer to compile than the tail itself. Prompts that are short beside the number of slots take part in it token
    by token, beside slots that are written: a prefill of its own would fill a GPU badly, and there are as many of them
    as texts. A completion's tokens then begin with its prompt's second one.
    """

    def in_rounds(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is taken token by token: that costs its share of the slots in so many rounds.

        A prefill of few rows costs about half a round of many.
        """
        return 2 * len(prompt) <= self.state.slots

    def prefill(self, slot: int, request: Request, plain: bool = False) -> None:
        """See `Engine.prefill`; prompts that are taken in rounds are only put ahead."""
        if not plain or not self.in_rounds(request.prompt_ids):
            super().prefill(slot, request, plain)
            return
        self.empty(slot)
        self.admit(slot, request)
        self.state.rewind(slot)
        self.state.publish(self._no_token, self._no_count)

    def accept(self, verified: Verified, greedy: bool, draws: Draws | None = None) -> Acceptance:
        """See `Engine.accept`."""
        return self.state.prompted(super().accept(verified, greedy, draws))

    @functools.cached_property
    def _no_token(self) -> Tensor:
        return torch.full((self.state.slots, 1), -1, device=self.target.device)

    @functools.cached_property
    def _no_count(self) -> Tensor:
        return torch.zeros(self.state.slots, dtype=torch.int64, device=self.target.device)

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
            assert tokenizer is not None, "the template is the tokenizer's"
            self.openings = [
                list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in self.data.openings
            ]
            if min(self._room(opening) for opening in self.openings) < 1:
                raise ValueError(
                    f"max_prompt_tokens = {self.data.max_prompt_tokens}: the chat template takes them all, with the "
                    "longest of the openings"
                )
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

    def _room(self, opening: list[int]) -> int:
        """Tokens that a made-up user turn may have behind its opening."""
        assert self.template is not None
        return self.data.max_prompt_tokens - len(self.template.before) - len(opening) - len(self.template.behind)

    def recipe(self) -> dict[str, Any]:
        """What decides a document besides its number, for the manifest."""
        names = (
            "openings", "prompt_temperatures", "temperatures", "max_prompt_tokens", "max_new_tokens", "loop_rounds",
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

    def shard(self, number: int, progress: Callable[[int], None]) -> list[Document]:
        """The documents of a shard, as `documents`.

        Raises:
            ValueError: all of them came to nothing.
        """
        first = number * self.data.shard_documents
        found = self.documents(range(first, first + self.data.shard_documents), progress)
        if not found:
            raise ValueError(
                f"documents {first} to {first + self.data.shard_documents - 1} all came to nothing: no user turn ended "
                f"within max_prompt_tokens = {self.data.max_prompt_tokens}"
            )
        return found

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
        if not self.prompts or self._answer_temperature(index) > 0:
            return True
        return index // len(self.prompts) == self.data.temperatures.index(0.0)

    def _prompts(self, indices: Sequence[int], progress: Callable[[int], None]) -> dict[int, list[int]]:
        if self.template is None:
            return {index: self.prompts[index % len(self.prompts)] for index in indices}
        data, tokenizer = self.data, self.tokenizer
        assert tokenizer is not None, "the template is the tokenizer's"
        # The number's digits, so that all combinations come up: answer's temperature, the turn's, its opening.
        warmth = [index // len(data.temperatures) for index in indices]
        start = [w // len(data.prompt_temperatures) % len(data.openings) for w in warmth]
        settings = [
            Settings(
                temperature=data.prompt_temperatures[w % len(data.prompt_temperatures)],
                seed=self._seed(index, USER), max_new_tokens=self._room(self.openings[s]),
            )
            for index, w, s in zip(indices, warmth, start, strict=True)
        ]  # fmt: skip
        turns = self._run([self.template.before + self.openings[s] for s in start], settings, progress)
        found = {}
        for index, s, turn in zip(indices, start, turns, strict=True):
            text = tokenizer.decode(self.openings[s] + turn.token_ids, skip_special_tokens=True).strip()
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
            if self.engine.in_rounds(prompts[index]):
                completion = dataclasses.replace(completion, token_ids=completion.token_ids[len(prompts[index]) - 1 :])
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
            },
        }
    )


def missing_shards(data: DataConfig, store: Store) -> list[int]:
    """Numbers of the shards still to be written."""
    return [number for number in range(data.documents // data.shard_documents) if not store.file(number).is_file()]


def write_data(config: TrainingConfig, store: Store, say: Callable[[str], None]) -> None:
    """Write the shards that are missing; processes that torchrun started share them, and return when all are there.

    Args:
        config: the run.
        store: of the data folder.
        say: called with lines of text.

    Raises:
        ValueError: the shards there were made another way, or all documents of a shard came to nothing.
    """
    writer: Writer | None = None
    with _Progress(config.data, store) as progress:
        for number in Beside("data").turns(config.data.documents // config.data.shard_documents):
            if store.file(number).is_file():
                continue
            if writer is None:
                writer = Writer(config, say)
                store.use_recipe(writer.recipe())
            store.add(number, writer.shard(number, progress.count))
            progress.show()
        if writer is not None:
            del writer
            forget()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        while missing_shards(config.data, store):  # of the other processes; torchrun ends us all if one of them fails
            time.sleep(1)
            progress.show()


class _Progress:
    """A bar over the shards of all processes; the first process shows it."""

    def __init__(self, data: DataConfig, store: Store) -> None:
        from tqdm import tqdm

        self.data, self.store, self.tokens = data, store, 0
        hidden = True if rank() else None
        self.bar = tqdm(total=data.documents, initial=self._written(), unit="document", disable=hidden)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def _written(self) -> int:
        return self.data.documents - len(missing_shards(self.data, self.store)) * self.data.shard_documents

    def count(self, tokens: int) -> None:
        """This process has written so many more."""
        self.tokens += tokens
        of = f" of process 0 of {started()}" if started() > 1 else ""
        self.bar.set_postfix_str(f"{self.tokens / max(self.bar.format_dict['elapsed'], 1e-9):.0f} tokens/s{of}")

    def show(self) -> None:
        """Shards may have come."""
        self.bar.n = self._written()
        self.bar.refresh()
