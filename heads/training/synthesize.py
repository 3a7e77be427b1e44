"""Training text that the target itself writes: it finishes our openings of user turns, then answers them.

One continuous batch: each slot holds one dialogue, fed token by token (its forced tokens, then what it samples), and
takes a new opening when it is done. Finished dialogues are appended to `dialogues.jsonl`, so a stop loses only those
that were being written.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import torch
from tqdm import tqdm

from decoding.cache import SlotCache
from decoding.chat import encode, template_pieces
from decoding.errors import DraftscopeError, UsageError
from decoding.target import Target
from heads.training.data import DIALOGUES, Dialogue, Summary, fingerprint, read_dialogues, write_meta

TOP_K = 64  # sampling looks at this many tokens: the rest of a vocabulary costs time and adds noise
USER_TEMPERATURE = 0.9
ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # half greedy: what the head will mostly be asked to draft
USER_TOKENS, ANSWER_TOKENS, DIALOGUE_TOKENS = 96, 288, 576
FOLLOW_UP_SHARE = 0.3


class Openings:
    """Draws openings of user turns, each kind as often as its weight says."""

    def __init__(self, seed: str) -> None:
        data = json.loads(resources.files(__package__).joinpath("openings.json").read_text())
        self.slots, self.kinds, self.follow_ups = data["slots"], data["kinds"], data["follow-ups"]
        self.names, self.weights = zip(*data["weights"].items(), strict=True)
        self.random = random.Random(seed)

    def first(self) -> tuple[str, str]:
        kind = self.random.choices(self.names, self.weights)[0]
        opening = self.random.choice(self.kinds[kind])
        while "{" in opening and (slot := next((name for name in self.slots if "{" + name + "}" in opening), None)):
            opening = opening.replace("{" + slot + "}", self.random.choice(self.slots[slot]), 1)
        return kind, opening

    def follow_up(self) -> str | None:
        return self.random.choice(self.follow_ups) if self.random.random() < FOLLOW_UP_SHARE else None

    def temperature(self) -> float:
        return self.random.choice(ANSWER_TEMPERATURES)


@dataclass
class Slot:
    """One dialogue being written. `forced` tokens are fed before anything is sampled."""

    kind: str
    forced: list[int]
    temperature: float
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    opening: str = ""
    turn_start: int = 0
    answering: bool = False


class Synthesizer:
    """Writes dialogues with one target; `run` yields each finished one."""

    def __init__(self, target: Target, batch: int, seed: str) -> None:
        if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
            raise UsageError(f"target {target.name} has no chat template: synthesis needs one (use ShareGPT text instead)")
        self.target, self.batch = target, batch
        self.openings = Openings(seed)
        before, self.to_answer = template_pieces(target.tokenizer, ["user"])
        self.to_next = template_pieces(target.tokenizer, ["user", "assistant", "user"])[2]
        self.before = encode(target.tokenizer, before)
        self.to_answer = encode(target.tokenizer, self.to_answer)
        self.to_next = encode(target.tokenizer, self.to_next)
        self.generator = torch.Generator(target.device).manual_seed(random.Random(seed).getrandbits(63))
        self.capacity = min(DIALOGUE_TOKENS, target.context_length)

    @torch.inference_mode()
    def run(self) -> Iterator[Dialogue]:
        target, device = self.target, self.target.device
        layers = target.model.config.get_text_config().num_hidden_layers
        cache = SlotCache(layers, self.batch, self.capacity, device)
        slots = [self._new_slot() for _ in range(self.batch)]
        while True:
            tokens = [slot.forced.pop(0) if slot.forced else slot.ids.pop() for slot in slots]
            for slot, token in zip(slots, tokens, strict=True):
                slot.ids.append(token)
            positions = torch.tensor([len(slot.ids) - 1 for slot in slots], device=device)
            mask = cache.place(positions)
            features = target.body(
                input_ids=torch.tensor(tokens, device=device)[:, None],
                attention_mask=mask,
                position_ids=positions[:, None],
                cache=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
            waiting = [index for index, slot in enumerate(slots) if not slot.forced]
            if not waiting:
                continue
            temperatures = [slots[i].temperature if slots[i].answering else USER_TEMPERATURE for i in waiting]
            drawn = self._sample(features[waiting], torch.tensor(temperatures, device=device))
            for index, token in zip(waiting, drawn, strict=True):
                done = self._take(slots[index], token)
                if done:
                    if slots[index].spans:
                        yield Dialogue(slots[index].kind, slots[index].temperature, slots[index].ids, slots[index].spans)
                    slots[index] = self._new_slot()

    def _new_slot(self) -> Slot:
        kind, opening = self.openings.first()
        ids = self.before + encode(self.target.tokenizer, opening, plain=True)
        return Slot(kind, ids, self.openings.temperature(), turn_start=len(ids), opening=opening)

    def _sample(self, features: torch.Tensor, temperatures: torch.Tensor) -> list[int]:
        top = self.target.logits(features).float().topk(min(TOP_K, self.target.vocab_size), dim=-1)
        probabilities = torch.softmax(top.values / temperatures.clamp(min=1e-3)[:, None], dim=-1)
        choice = torch.multinomial(probabilities, 1, generator=self.generator)
        choice[temperatures == 0] = 0
        return top.indices.gather(1, choice)[:, 0].tolist()

    def _take(self, slot: Slot, token: int) -> bool:
        """Put a sampled token into its dialogue; True when the dialogue is finished."""
        length = len(slot.ids)
        stopped = token in self.target.stop_token_ids
        if not slot.answering:
            if not stopped and length - slot.turn_start < USER_TOKENS and length + 64 < self.capacity:
                slot.ids.append(token)
                return False
            slot.forced = list(self.to_answer)
            slot.answering = True
            slot.turn_start = length + len(self.to_answer)
            return False
        if not stopped and length - slot.turn_start < ANSWER_TOKENS and length < self.capacity - 1:
            slot.ids.append(token)
            return False
        end = length
        if stopped:
            slot.ids.append(token)  # the stop token is part of the answer
            end += 1
        if end - slot.turn_start > 1:
            slot.spans.append((slot.turn_start, end))
        follow_up = self.openings.follow_up() if stopped and end + 160 < self.capacity else None
        if follow_up is None:
            return True
        between = self.to_next[1:] if self.to_next and self.to_next[0] == token else self.to_next
        slot.forced = between + encode(self.target.tokenizer, follow_up, plain=True)
        slot.turn_start = end + len(slot.forced)
        slot.answering = False
        # the stop token was sampled but not yet fed: it is fed first
        slot.ids.pop()
        slot.forced.insert(0, token)
        return False


def synthesize(target: Target, tokens: int, out: Path, batch: int = 128, seed: int = 0) -> dict:
    """Write dialogues into `out` until it holds `tokens` answer tokens; goes on where an earlier run stopped.

    Returns:
        What is in the folder: dialogues, answer tokens by kind, length statistics, tokens per second of this run.
    """
    if tokens < 1 or batch < 1:
        raise UsageError("--tokens and --batch are at least 1")
    out.mkdir(parents=True, exist_ok=True)
    write_meta(out, target)
    path = out / DIALOGUES
    seen, summary = set(), Summary()
    for dialogue in read_dialogues(out, target, repair=True):
        seen.add(fingerprint(dialogue))
        summary.add(dialogue)
    before = kept = summary.answer_tokens
    duplicates, started = 0, time.monotonic()
    # a resumed run draws other openings than the ones that are already answered
    writer = Synthesizer(target, batch, seed=f"{seed}/{len(summary.lengths)}")
    try:
        with path.open("a") as file, tqdm(total=tokens, initial=kept, unit="tok", desc="synthesize", mininterval=2) as bar:
            dialogues = writer.run() if kept < tokens else iter(())
            for dialogue in dialogues:
                mark = fingerprint(dialogue)
                if mark in seen:
                    duplicates += 1
                    continue
                seen.add(mark)
                file.write(dialogue.to_json() + "\n")
                file.flush()
                summary.add(dialogue)
                kept += dialogue.answer_tokens
                bar.update(dialogue.answer_tokens)
                if kept >= tokens:
                    break
            os.fsync(file.fileno())
    except OSError as error:
        raise DraftscopeError(f"can't write {path}: {error.strerror or error} (what is there stays usable)") from error
    speed = round((kept - before) / max(time.monotonic() - started, 1e-9), 1)
    return {**summary.to_json(), "duplicates_dropped": duplicates, "tokens_per_second": speed}
