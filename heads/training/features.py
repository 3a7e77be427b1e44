"""Target features of the training text, computed once and kept on disk (bfloat16, memory-mapped, outside the project)."""

import hashlib
import os
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
from heads.training.sharegpt import read_sharegpt
from heads.training.workers import Workers

BATCH_TOKENS = 4096  # of one target forward
FLUSH_EVERY = 25  # forwards between notes of progress: what a kill loses at most
MIN_ANSWER_TOKENS = 1000
BLOCK = 1 << 24


@dataclass
class FeatureStore:
    """All dialogues one after the other: token ids, what the assistant wrote, and the target's feature of every token."""

    tokens: np.ndarray  # [total] int32
    answer: np.ndarray  # [total] bool
    offsets: np.ndarray  # [dialogues + 1]
    kinds: list[str]
    features: np.ndarray | None  # [total, hidden] uint16: the bits of bfloat16; None: computed when they are needed
    digest: str  # of the text

    def __len__(self) -> int:
        return len(self.kinds)

    def length(self, dialogue: int) -> int:
        return int(self.offsets[dialogue + 1] - self.offsets[dialogue])

    def rows(self, dialogue: int) -> slice:
        return slice(int(self.offsets[dialogue]), int(self.offsets[dialogue + 1]))

    def supervised(self, dialogue: int) -> int:
        """Pairs of a dialogue that have something to learn: those two tokens before one that the assistant wrote."""
        return int(self.answer[self.rows(dialogue)][2:].sum())


def read_text(target: Target, sources: Sequence[Path], max_length: int) -> FeatureStore:
    """The dialogues of some folders (made by `synthesize`) and ShareGPT files, without features.

    Raises:
        UsageError: another target's text, no assistant turns, or too little text.
    """
    dialogues: dict[str, Dialogue] = {}
    for source in sources:
        for dialogue in read_sharegpt(source, target) if source.is_file() else read_dialogues(source, target):
            if dialogue.spans:
                dialogues.setdefault(fingerprint(dialogue), _cut(dialogue, max_length))
    text = [dialogue for dialogue in dialogues.values() if dialogue.answer_tokens]
    answers = sum(dialogue.answer_tokens for dialogue in text)
    if not answers:
        raise UsageError(f"{', '.join(map(str, sources))}: no assistant turns to learn from")
    if answers < MIN_ANSWER_TOKENS:
        raise UsageError(f"only {answers} answer tokens: too little to train on (at least {MIN_ANSWER_TOKENS}); synthesize more")
    offsets = np.cumsum([0, *(len(dialogue.ids) for dialogue in text)])
    tokens = np.concatenate([np.array(dialogue.ids, dtype=np.int32) for dialogue in text])
    if int(tokens.max()) >= target.vocab_size or int(tokens.min()) < 0:
        raise UsageError(f"{', '.join(map(str, sources))}: token ids outside the target's {target.vocab_size} tokens")
    answer = np.zeros(len(tokens), dtype=bool)
    for dialogue, offset in zip(text, offsets, strict=False):
        for start, end in dialogue.spans:
            answer[offset + start : offset + end] = True
    digest = hashlib.sha1(f"{target.name}/{target.hidden_size}/{max_length}".encode())
    for dialogue in text:
        digest.update(np.array(dialogue.ids, dtype=np.int32).tobytes())
    return FeatureStore(tokens, answer, offsets, [dialogue.kind for dialogue in text], None, digest.hexdigest()[:16])


def prepare_features(target: Target, sources: Sequence[Path], max_length: int = 2048, workers: Workers | None = None) -> FeatureStore:
    """The text of some sources with its features; computed where the cache does not have them, from where it stopped.

    The processes of one machine share the work.

    Raises:
        UsageError: as `read_text`.
        DraftscopeError: the disk is full; what is there is kept.
    """
    store = read_text(target, sources, max_length)
    folder = cache_dir() / "features" / store.digest
    try:
        store.features = _compute(target, store, folder, workers or Workers())
    except OSError as error:
        raise DraftscopeError(f"features can't be kept in {folder}: {error.strerror or error} (what is there is used next time)") from error
    return store


def _cut(dialogue: Dialogue, length: int) -> Dialogue:
    if len(dialogue.ids) <= length:
        return dialogue
    spans = [(start, min(end, length)) for start, end in dialogue.spans if start < length]
    return Dialogue(dialogue.kind, dialogue.temperature, dialogue.ids[:length], spans)


def _compute(target: Target, store: FeatureStore, folder: Path, workers: Workers) -> np.ndarray:
    shape = (len(store.tokens), target.hidden_size)
    batches = length_batches([store.length(i) for i in range(len(store))], BATCH_TOKENS, random.Random(0))
    path, marks = folder / "features.bin", folder / "done.bin"
    if workers.local_rank == 0:
        _allocate(path, shape[0] * shape[1] * 2, marks, len(batches))
    workers.wait()
    features = np.memmap(path, dtype=np.uint16, mode="r+", shape=shape)
    done = np.memmap(marks, dtype=np.uint8, mode="r+", shape=(len(batches),))
    own = range(workers.local_rank, len(batches), workers.local_count)
    waiting: list[int] = []  # batches that are written but not yet noted as done
    with tqdm(total=len(own), unit="batch", desc="features", file=sys.stderr, disable=not workers.first) as bar:
        for number in own:
            if not done[number]:
                for index, rows in zip(batches[number], target_features(target, store, batches[number]), strict=True):
                    features[store.rows(index)] = rows.to("cpu", torch.bfloat16).view(torch.uint16).numpy()
                waiting.append(number)
            if len(waiting) >= FLUSH_EVERY or number == own[-1]:
                features.flush()
                done[waiting] = 1
                done.flush()
                waiting = []
            bar.update()
    workers.wait()
    return features


def _allocate(path: Path, size: int, marks: Path, batches: int) -> None:
    """Files of the right size, their space reserved: a disk that is too full is noticed now, not by a mapped page later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and marks.exists() and path.stat().st_size == size and marks.stat().st_size == batches:
        return
    marks.unlink(missing_ok=True)
    try:
        for file, length in ((path, size), (marks, batches)):
            with file.open("wb") as created:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(created.fileno(), 0, length)
                else:
                    for start in range(0, length, BLOCK):
                        created.write(bytes(min(BLOCK, length - start)))
    except OSError:
        path.unlink(missing_ok=True)
        marks.unlink(missing_ok=True)
        raise


@torch.inference_mode()
def target_features(target: Target, store: FeatureStore, dialogues: Sequence[int]) -> list[torch.Tensor]:
    """Per dialogue [its tokens, hidden], by one target forward; padding stands on the right, where nothing sees it."""
    ids = torch.zeros(len(dialogues), max(store.length(i) for i in dialogues), dtype=torch.long)
    for row, index in enumerate(dialogues):
        ids[row, : store.length(index)] = torch.from_numpy(store.tokens[store.rows(index)].astype(np.int64))
    out = target.body(input_ids=ids.to(target.embedding.weight.device), use_cache=False).last_hidden_state
    return [out[row, : store.length(index)].to(target.device) for row, index in enumerate(dialogues)]


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
