"""Target features of the training text, computed once and kept on disk (bfloat16, memory-mapped, outside the project)."""

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from decoding.embedded import cache_dir
from decoding.errors import DraftscopeError, UsageError
from decoding.target import Target
from heads.training.data import Dialogue, fingerprint, read_dialogues

BATCH_TOKENS = 4096  # of one target forward
FLUSH_EVERY = 25  # forwards between notes of progress: what a kill loses at most
MIN_ANSWER_TOKENS = 1000


@dataclass
class FeatureStore:
    """All dialogues one after the other: token ids, what the assistant wrote, and the target's feature of every token."""

    tokens: np.ndarray  # [total] int32
    answer: np.ndarray  # [total] bool
    offsets: np.ndarray  # [dialogues + 1]
    kinds: list[str]
    features: np.ndarray  # [total, hidden] uint16: the bits of bfloat16

    def __len__(self) -> int:
        return len(self.kinds)

    def length(self, dialogue: int) -> int:
        return int(self.offsets[dialogue + 1] - self.offsets[dialogue])

    def rows(self, dialogue: int) -> slice:
        return slice(int(self.offsets[dialogue]), int(self.offsets[dialogue + 1]))


def prepare_features(target: Target, folders: Sequence[Path], max_length: int = 2048) -> FeatureStore:
    """The text of some folders with its features; computed where the cache does not have them, from where it stopped.

    Raises:
        UsageError: another target's text, no assistant turns, or too little text.
        DraftscopeError: the disk is full; what is there is kept.
    """
    dialogues: dict[str, Dialogue] = {}
    for folder in folders:
        for dialogue in read_dialogues(folder, target):
            dialogues.setdefault(fingerprint(dialogue), _cut(dialogue, max_length))
    text = [dialogue for dialogue in dialogues.values() if dialogue.answer_tokens]
    answers = sum(dialogue.answer_tokens for dialogue in text)
    if not answers:
        raise UsageError(f"{', '.join(map(str, folders))}: no assistant turns to learn from")
    if answers < MIN_ANSWER_TOKENS:
        raise UsageError(f"only {answers} answer tokens: too little to train on (at least {MIN_ANSWER_TOKENS}); synthesize more")
    digest = hashlib.sha1(f"{target.name}/{target.hidden_size}/{max_length}".encode())
    for dialogue in text:
        digest.update(np.array(dialogue.ids, dtype=np.int32).tobytes())
    folder = cache_dir() / "features" / digest.hexdigest()[:16]
    try:
        return _compute(target, text, folder)
    except OSError as error:
        raise DraftscopeError(f"features can't be kept in {folder}: {error.strerror or error} (what is there is used next time)") from error


def _cut(dialogue: Dialogue, length: int) -> Dialogue:
    if len(dialogue.ids) <= length:
        return dialogue
    spans = [(start, min(end, length)) for start, end in dialogue.spans if start < length]
    return Dialogue(dialogue.kind, dialogue.temperature, dialogue.ids[:length], spans)


def _compute(target: Target, text: list[Dialogue], folder: Path) -> FeatureStore:
    folder.mkdir(parents=True, exist_ok=True)
    offsets = np.cumsum([0, *(len(dialogue.ids) for dialogue in text)])
    total = int(offsets[-1])
    tokens = np.concatenate([np.array(dialogue.ids, dtype=np.int32) for dialogue in text])
    answer = np.zeros(total, dtype=bool)
    for dialogue, offset in zip(text, offsets, strict=False):
        for start, end in dialogue.spans:
            answer[offset + start : offset + end] = True
    path, progress = folder / "features.bin", folder / "progress.json"
    fresh = not (path.exists() and progress.exists())
    shape = (total, target.hidden_size)
    features = np.memmap(path, dtype=np.uint16, mode="w+" if fresh else "r+", shape=shape)
    done = 0 if fresh else json.loads(progress.read_text())["batches"]
    batches = length_batches([len(dialogue.ids) for dialogue in text], BATCH_TOKENS, random.Random(0))
    with torch.inference_mode(), tqdm(total=len(batches), initial=done, unit="batch", desc="features", file=sys.stderr) as bar:
        for number in range(done, len(batches)):
            batch = batches[number]
            ids = torch.zeros(len(batch), max(len(text[i].ids) for i in batch), dtype=torch.long)
            for row, index in enumerate(batch):
                ids[row, : len(text[index].ids)] = torch.tensor(text[index].ids)
            # padding stands on the right: causal attention never sees it
            out = target.body(input_ids=ids.to(target.embedding.weight.device), use_cache=False).last_hidden_state
            out = out.to("cpu", torch.bfloat16).view(torch.uint16).numpy()
            for row, index in enumerate(batch):
                features[offsets[index] : offsets[index + 1]] = out[row, : len(text[index].ids)]
            bar.update()
            if (number + 1) % FLUSH_EVERY == 0 or number + 1 == len(batches):
                features.flush()
                aside = progress.with_suffix(".part")
                aside.write_text(json.dumps({"batches": number + 1, "of": len(batches)}))
                aside.replace(progress)
    return FeatureStore(tokens, answer, offsets, [dialogue.kind for dialogue in text], features)


def length_batches(lengths: Sequence[int], tokens: int, order: random.Random) -> list[list[int]]:
    """Indices in batches of at most `tokens` padded tokens and similar lengths, in random order."""
    shuffled = list(range(len(lengths)))
    order.shuffle(shuffled)
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), 512):  # sort within pieces: batches differ from epoch to epoch
        current: list[int] = []
        for index in sorted(shuffled[start : start + 512], key=lambda i: lengths[i]):
            if current and (len(current) + 1) * lengths[index] > tokens:
                batches.append(current)
                current = []
            current.append(index)
        batches.append(current)
    order.shuffle(batches)
    return batches
