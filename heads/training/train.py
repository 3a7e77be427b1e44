"""One training loop for all FeatureHead methods; a method is a row of defaults.

Each optimizer step: n aligned forwards of the head (HASS; n = 1 is EAGLE), the losses of each, one backward.
Checkpoints hold everything (weights, optimizer, random state, place in the data), so a killed run goes on as if it had not
been killed.
"""

import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig

from decoding.errors import DraftscopeError, UsageError
from decoding.target import Target
from heads.checkpoint import HeadMeta, save_feature_head
from heads.feature import FeatureHead, FeatureShape
from heads.training.alignment import aligned_forwards
from heads.training.features import FeatureStore, length_batches, prepare_features
from heads.training.losses import LossWeights, step_loss, teacher_distribution

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"
HELD_OUT = 0.02
EVAL_STEPS = 5  # draft steps at which the held-out agreement is told, for every method alike


@dataclass(frozen=True)
class Recipe:
    """What a method sets; every field can be set by hand."""

    method: str
    layers: int = 1
    align_steps: int = 1
    # the papers weigh the cross-entropy with 0.1 (EAGLE, HASS). On a target of this size agreement of tokens, not of
    # features, limits acceptance, and 1.0 gives more of it: see README, "Training heads"
    feature_weight: float = 1.0
    soft_weight: float = 1.0
    top_weight: float = 0.0
    top_k: int = 10
    noise: float = 0.1  # uniform, on the input features (EAGLE)
    learning_rate: float = 1e-3
    batch_tokens: int = 2048
    epochs: int = 2
    draft_vocab: int | None = None
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 0

    @property
    def weights(self) -> LossWeights:
        return LossWeights(self.feature_weight, self.soft_weight, self.top_weight, self.top_k)


METHODS = {
    "eagle": Recipe("eagle"),
    "hass": Recipe("hass", align_steps=3, top_weight=1.0),
    "koala-eagle": Recipe("koala-eagle", layers=2),
    "hass-koala": Recipe("hass-koala", layers=2, align_steps=3, top_weight=1.0),
}


def train(
    target: Target,
    recipe: Recipe,
    folders: Sequence[Path],
    out: Path,
    *,
    max_length: int = 2048,
    checkpoint_minutes: float = 5.0,
    max_minutes: float | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Train a head and write it to `out`; goes on from a checkpoint that is there.

    Returns:
        The last held-out figures.

    Raises:
        UsageError: unusable data, or a checkpoint of another recipe.
        DraftscopeError: the loss is not a number; the last checkpoint is kept.
    """
    store = prepare_features(target, folders, max_length)
    trainer = Trainer(target, recipe, store, out, command)
    trainer.resume()
    return trainer.run(checkpoint_minutes, max_minutes)


class Trainer:
    """State of one training."""

    def __init__(self, target: Target, recipe: Recipe, store: FeatureStore, out: Path, command: str = "") -> None:
        self.target, self.recipe, self.store, self.out, self.command = target, recipe, store, out, command
        order = list(range(len(store)))
        random.Random(0).shuffle(order)  # the same split for every method and seed
        held = max(1, round(HELD_OUT * len(order)))
        self.held, self.used = sorted(order[:held]), sorted(order[held:])
        self.draft_vocab, self.coverage = self._draft_vocab()
        weight = target.lm_head.weight
        self.lm_head = (weight if self.draft_vocab is None else weight[self.draft_vocab.to(weight.device)]).contiguous()
        self.in_vocab = torch.ones(target.vocab_size, dtype=torch.bool)
        if self.draft_vocab is not None:
            self.in_vocab = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, self.draft_vocab, True)
        torch.manual_seed(recipe.seed)
        self.head = FeatureHead(head_shape(target, recipe.layers)).to(target.device)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.generator = torch.Generator(target.device).manual_seed(recipe.seed)
        self.epoch = self.batch = self.step = 0
        self.tokens_seen = 0  # supervised tokens, each epoch counted
        self.minutes = 0.0
        self.steps = sum(len(self._batches(epoch)) for epoch in range(recipe.epochs))

    def run(self, checkpoint_minutes: float, max_minutes: float | None) -> dict[str, Any]:
        """Train to the end, or for `max_minutes` (a checkpoint is left, the head is written either way)."""
        started = saved = time.monotonic()
        before = self.minutes
        figures: dict[str, Any] = {}
        with tqdm(total=self.steps, initial=self.step, unit="step", desc=self.recipe.method, file=sys.stderr) as bar:
            while self.epoch < self.recipe.epochs:
                batches = self._batches(self.epoch)
                while self.batch < len(batches):
                    log = self._train_step(batches[self.batch])
                    self.batch += 1
                    self.step += 1
                    now = time.monotonic()
                    self.minutes = before + (now - started) / 60
                    bar.update()
                    if self.step % 20 == 0:
                        bar.set_postfix_str(f"loss {log['loss']:.3f}, agreement {log['agreement']}", refresh=False)
                        self._log({"step": self.step, "epoch": self.epoch, "minutes": round(self.minutes, 2), **log})
                    if max_minutes is not None and (now - started) / 60 >= max_minutes:
                        self.save()
                        return self._finish()
                    if (now - saved) / 60 >= checkpoint_minutes:
                        self.save()
                        saved = now
                self.epoch, self.batch = self.epoch + 1, 0
                figures = self.evaluate()
                self._log({"step": self.step, "held_out": figures, "minutes": round(self.minutes, 2)})
                bar.write(f"epoch {self.epoch}: held-out top-1 by draft step {figures['top1']}, top-4 {figures['top4']}", file=sys.stderr)
        self.save()
        return self._finish(figures)

    def _train_step(self, dialogues: list[int]) -> dict[str, Any]:
        recipe = self.recipe
        batch = self._load(dialogues)
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        features = batch.features
        if recipe.noise:
            noise = torch.rand(features.shape, generator=self.generator, device=features.device, dtype=torch.float32)
            features = features + ((noise - 0.5) * 2 * recipe.noise).to(features.dtype)
        total, losses = 0.0, []
        with torch.autocast(self.target.device.type, self.target.dtype, enabled=self.target.dtype != torch.float32):
            outputs = aligned_forwards(self.head, batch.embeddings, features, recipe.align_steps)
        for output in outputs:
            loss = step_loss(output[batch.rows], batch.wanted, batch.teacher, batch.counted, self.lm_head, recipe.weights)
            losses.append(loss)
            total = total + loss.total  # gradients of the aligned steps are summed, not averaged (HASS)
        if not math.isfinite(total.item()):
            raise DraftscopeError(f"the loss is not a number at step {self.step}; the last checkpoint in {self.out} is kept: lower --lr")
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip_norm)
        self.optimizer.step()
        self.tokens_seen += len(batch.wanted)
        return {
            "loss": round(total.item() / recipe.align_steps, 4),
            "feature": [round(loss.feature, 4) for loss in losses],
            "soft": [round(loss.soft, 4) for loss in losses],
            "top": [round(loss.top, 4) for loss in losses],
            "agreement": [round(loss.agreement, 3) for loss in losses],
            "gradient_norm": round(norm.item(), 3),
            "learning_rate": rate,
            "tokens_seen": self.tokens_seen,
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Held-out agreement with the target by draft step: step m is what the head does at tree depth m, whatever it was
        trained with. A token outside the draft vocabulary counts as missed."""
        hits1, hits4 = np.zeros(EVAL_STEPS), np.zeros(EVAL_STEPS)
        count = 0
        for batch in length_batches([self.store.length(i) for i in self.held], self.recipe.batch_tokens, random.Random(0)):
            data = self._load([self.held[i] for i in batch])
            with torch.autocast(self.target.device.type, self.target.dtype, enabled=self.target.dtype != torch.float32):
                outputs = aligned_forwards(self.head, data.embeddings, data.features, EVAL_STEPS)
            best = data.teacher.argmax(-1)
            count += len(best)
            for step, output in enumerate(outputs):
                top = functional.linear(output[data.rows].to(self.lm_head.dtype), self.lm_head).topk(4, dim=-1).indices
                same = (top == best[:, None]) & data.counted.bool()[:, None]
                hits1[step] += same[:, 0].sum().item()
                hits4[step] += same.any(-1).sum().item()
        return {"top1": (hits1 / count).round(4).tolist(), "top4": (hits4 / count).round(4).tolist(), "tokens": count}

    def save(self) -> None:
        """Write the checkpoint aside, then rename it."""
        state = {
            "recipe": asdict(self.recipe),
            "data": self._data_mark(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "place": [self.epoch, self.batch, self.step, self.tokens_seen, self.minutes],
        }
        self.out.mkdir(parents=True, exist_ok=True)
        aside = self.out / (CHECKPOINT + ".part")
        try:
            torch.save(state, aside)
            aside.replace(self.out / CHECKPOINT)
        except (OSError, RuntimeError) as error:
            aside.unlink(missing_ok=True)
            raise DraftscopeError(f"no checkpoint could be written to {self.out}: {error} (the one before is kept)") from error

    def resume(self) -> None:
        """Go on from the checkpoint in `out`, if there is one."""
        path = self.out / CHECKPOINT
        if not path.exists():
            return
        state = torch.load(path, map_location=self.target.device, weights_only=True)
        if state["recipe"] != asdict(self.recipe) or state["data"] != self._data_mark():
            other = [name for name, value in asdict(self.recipe).items() if state["recipe"].get(name) != value] or ["the data"]
            raise UsageError(f"{path} is of another training ({', '.join(other)} differ): use another --out, or the same settings")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.epoch, self.batch, self.step, self.tokens_seen, self.minutes = state["place"]

    def _finish(self, figures: dict[str, Any] | None = None) -> dict[str, Any]:
        figures = figures or self.evaluate()
        meta = HeadMeta(
            method=self.recipe.method,
            target=self.target.name,
            align_steps=self.recipe.align_steps,
            tokens_seen=self.tokens_seen,
            training={
                **asdict(self.recipe),
                "text_tokens": int(self.store.answer.sum()),
                "minutes": round(self.minutes, 1),
                "draft_vocab_coverage": self.coverage,
                "command": self.command,
            },
            results={"held_out": figures},
        )
        try:
            save_feature_head(self.out, self.head, meta, self.draft_vocab)
        except OSError as error:
            raise DraftscopeError(f"the head can't be written to {self.out}: {error.strerror or error}") from error
        return figures

    def _rate(self) -> float:
        """Linear warm-up over 4 % of the steps, then a cosine down to a tenth."""
        warm = max(1, round(0.04 * self.steps))
        if self.step < warm:
            return self.recipe.learning_rate * (self.step + 1) / warm
        part = (self.step - warm) / max(1, self.steps - warm)
        return self.recipe.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part)))

    def _batches(self, epoch: int) -> list[list[int]]:
        lengths = [self.store.length(i) for i in self.used]
        batches = length_batches(lengths, self.recipe.batch_tokens, random.Random(f"{self.recipe.seed}/{epoch}"))
        return [[self.used[i] for i in batch] for batch in batches]

    def _load(self, dialogues: list[int]) -> "Batch":
        """Pairs (feature i, token i + 1) of some dialogues, and what the supervised ones should give."""
        store, device = self.store, self.target.device
        rows = max(store.length(i) for i in dialogues) - 1
        ids = torch.zeros(len(dialogues), rows + 1, dtype=torch.long)
        answer = torch.zeros(len(dialogues), rows + 1, dtype=torch.bool)
        features = torch.zeros(len(dialogues), rows + 1, self.target.hidden_size, dtype=torch.bfloat16)
        for row, index in enumerate(dialogues):
            place, length = store.rows(index), store.length(index)
            ids[row, :length] = torch.from_numpy(store.tokens[place].astype(np.int64))
            answer[row, :length] = torch.from_numpy(store.answer[place])
            features[row, :length] = torch.from_numpy(np.array(store.features[place])).view(torch.bfloat16)
        # pair i predicts feature i + 1, and with it token i + 2: supervised where the assistant wrote that token
        supervised = torch.zeros(len(dialogues), rows, dtype=torch.bool)
        supervised[:, : rows - 1] = answer[:, 2:]
        following = ids[:, 2:][supervised[:, : rows - 1]]
        features, ids, supervised = features.to(device, self.target.dtype), ids.to(device), supervised.to(device)
        embeddings = self.target.embedding(ids[:, 1:].to(self.target.embedding.weight.device)).to(device)
        wanted = features[:, 1:][supervised]
        return Batch(
            embeddings,
            features[:, :-1],
            supervised,
            wanted,
            teacher_distribution(wanted, self.lm_head),
            self.in_vocab[following].float().to(device),
        )

    def _draft_vocab(self) -> tuple[torch.Tensor | None, dict[str, float]]:
        """The most frequent answer tokens of the training share, ascending, and what share of each kind they cover."""
        size = self.recipe.draft_vocab
        if size is None:
            return None, {}
        counts: dict[str, Counter[int]] = {}
        for index in self.used:
            place = self.store.rows(index)
            counts.setdefault(self.store.kinds[index], Counter()).update(self.store.tokens[place][self.store.answer[place]].tolist())
        total = sum(counts.values(), Counter())
        for stop in self.target.stop_token_ids:
            total[stop] += 1 << 40  # always in it
        # where the text has fewer different tokens, the first ids fill up (byte-pair ids are in order of frequency)
        ranked = [token for token, _ in total.most_common(size)]
        rest = (token for token in range(self.target.vocab_size) if token not in total)
        chosen = set(ranked + [token for token, _ in zip(rest, range(size - len(ranked)), strict=False)])
        coverage = {
            kind: round(sum(n for token, n in found.items() if token in chosen) / sum(found.values()), 4) for kind, found in counts.items()
        }
        every = sum(counts.values(), Counter())
        coverage["all"] = round(sum(n for token, n in every.items() if token in chosen) / sum(every.values()), 4)
        return torch.tensor(sorted(chosen)), coverage

    def _data_mark(self) -> list[int]:
        return [len(self.store), int(self.store.offsets[-1]), int(self.store.tokens[:1000].sum())]

    def _log(self, entry: dict[str, Any]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / METRICS).open("a") as file:
            file.write(json.dumps(entry) + "\n")


@dataclass
class Batch:
    """Padded pairs [batch, rows, hidden]; `rows` marks the supervised ones, the last three are theirs alone, in order."""

    embeddings: torch.Tensor
    features: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor
    teacher: torch.Tensor
    counted: torch.Tensor


def head_shape(target: Target, layers: int) -> FeatureShape:
    """A head of the target's own layer sizes, its rope included."""
    config = target.model.config.get_text_config()
    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=getattr(config, "rope_parameters", None),
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    return FeatureShape(llama)


def recipe_for(method: str, **changes: Any) -> Recipe:
    """A method's recipe with the given fields changed; None leaves a default."""
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}: possible are {', '.join(METHODS)}")
    recipe = replace(METHODS[method], **{name: value for name, value in changes.items() if value is not None})
    for name in ("layers", "align_steps", "epochs", "batch_tokens", "top_k"):
        if getattr(recipe, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is at least 1")
    if recipe.learning_rate <= 0 or not math.isfinite(recipe.learning_rate):
        raise UsageError("--learning-rate is a number above 0")
    return recipe
