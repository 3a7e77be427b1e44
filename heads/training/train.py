"""One training loop for all methods; a method is a row of defaults (recipe.py).

Each optimizer step: the head's estimates at every draft step (HASS: n aligned forwards; n = 1 is EAGLE; Medusa: its
positions), the losses of each, one backward. Checkpoints hold everything, so a killed run goes on as if it had not been
killed; under `accelerate launch` every process takes its share of the batches of a step.
"""

import math
import pickle
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parametrize
from tqdm import tqdm

from decoding.errors import DraftscopeError, UsageError
from decoding.target import Target
from heads.checkpoint import HeadMeta, check_draft_vocab
from heads.training.adversary import Discriminator, adversarial_loss, discriminator_loss
from heads.training.batches import BatchLoader
from heads.training.conditioning import condition, input_sizes, start_norms
from heads.training.features import FeatureStore, length_batches, prepare_features, read_text
from heads.training.heldout import STEPS as EVAL_STEPS
from heads.training.heldout import HeldOut, measure
from heads.training.log import Log
from heads.training.losses import STATISTICS, step_loss
from heads.training.recipe import Recipe
from heads.training.students import FeatureStudent, MedusaStudent, fit_input, read_start, take_over
from heads.training.vocabulary import answer_counts, coverage, draft_vocabulary
from heads.training.workers import Workers

CHECKPOINT = "checkpoint.pt"
HELD_OUT = 0.02  # share of the dialogues
GLANCES, GLANCE_TOKENS = 8, 4000  # looks at a part of the held-out text, evenly over the training
LOG_EVERY = 20  # steps
SIZE_BATCHES = 4  # whose embeddings and features tell the sizes of a head's inputs
FIT_ROWS = 40  # supervised pairs per input of `fc` that its first weights are fitted to
ADVERSARY_STATISTICS = ("adversarial", "discriminator", "real_recognised", "fake_recognised")


def train(
    target: Target,
    recipe: Recipe,
    sources: Sequence[Path],
    out: Path,
    *,
    max_length: int = 2048,
    checkpoint_minutes: float = 5.0,
    max_minutes: float | None = None,
    snapshots: int = 0,
    keep_features: bool = True,
    command: str = "",
    workers: Workers | None = None,
) -> HeldOut:
    """Train a head and write it to `out`; goes on from a checkpoint that is there.

    Args:
        sources: folders made by `synthesize`, or ShareGPT files.
        snapshots: heads to write on the way, evenly, into `out`/<tokens seen>.
        keep_features: False computes the target's features in every step instead of once, on disk.

    Returns:
        The last held-out figures.

    Raises:
        UsageError: unusable data, or a checkpoint of another recipe.
        DraftscopeError: the loss is not a number; the last checkpoint is kept.
    """
    workers = workers or Workers()
    store = prepare_features(target, sources, max_length, workers) if keep_features else read_text(target, sources, max_length)
    trainer = Trainer(target, recipe, store, out, command, workers)
    if not trainer.resume():
        trainer.begin()
    return trainer.run(checkpoint_minutes, max_minutes, snapshots)


class Trainer:
    """State of one training."""

    def __init__(
        self, target: Target, recipe: Recipe, store: FeatureStore, out: Path, command: str = "", workers: Workers | None = None
    ) -> None:
        self.target, self.recipe, self.store, self.out, self.command = target, recipe, store, out, command
        self.workers = workers or Workers()
        order = list(range(len(store)))
        random.Random(0).shuffle(order)  # the same split for every method and seed
        held = max(1, round(HELD_OUT * len(order)))
        self.held, self.used = sorted(order[:held]), sorted(order[held:])
        if not any(store.supervised(i) for i in self.used) or not any(store.supervised(i) for i in self.held):
            raise UsageError("too little text: nothing is left to learn from, or to check on, once a part is held out")
        self.start = read_start(Path(recipe.start), recipe.family) if recipe.start is not None else None
        self.draft_vocab, self.coverage = self._vocabulary()
        self.loader = BatchLoader(target, store, self.draft_vocab, recipe.top_k, recipe.hard_labels)
        torch.manual_seed(recipe.seed)
        medusa = recipe.family == "medusa"
        self.student = MedusaStudent(target, recipe, self.loader.lm_head) if medusa else FeatureStudent(target, recipe)
        self.head = self.student.module.to(target.device, torch.float32)
        self.optimizers: list[torch.optim.Optimizer] = []  # once the first weights are there
        self.judge: Discriminator | None = None
        if recipe.adversary:
            self.judge = Discriminator(target.hidden_size, self.student.context, recipe.steps).to(target.device)
            self.judge_optimizer = torch.optim.AdamW(self.judge.parameters(), recipe.adversary_rate, betas=(0.5, 0.99))
        self.generator = torch.Generator(target.device)
        self.epoch = self.group = self.step = 0  # group: the epoch's optimizer steps that are done
        self.tokens_seen = 0  # supervised tokens, each visit counted
        self.minutes = 0.0
        self.steps = sum(1 for _ in self._plan())

    def _vocabulary(self) -> tuple[torch.Tensor | None, dict[str, float]]:
        """The draft vocabulary, which a second stage takes over, and what share of the answers it covers."""
        recipe, target = self.recipe, self.target
        if self.start is None and recipe.draft_vocab is None:
            return None, {}
        counts = answer_counts(self.store, self.used)
        if self.start is None:
            vocab = draft_vocabulary(counts, recipe.draft_vocab, target.vocab_size, target.stop_token_ids)
        else:
            vocab = self.start[2]
            check_draft_vocab(recipe.start, vocab, target.vocab_size)
            size = target.vocab_size if vocab is None else len(vocab)
            if recipe.draft_vocab not in (None, size):
                raise UsageError(
                    f"--start {recipe.start} drafts from {size} tokens, and so does what is made of it: leave out --draft-vocab"
                )
        return vocab, {} if vocab is None else coverage(counts, set(vocab.tolist()))

    def begin(self) -> None:
        """First weights: another head's, whose training this one continues, or for a FeatureHead the best linear guess."""
        recipe, feature_head = self.recipe, self.recipe.family == "feature"
        sizes = input_sizes(self.loader, self._batches(0)[:SIZE_BATCHES])
        if self.start is not None:
            module, before, _ = self.start
            take_over(self.head, module, Path(recipe.start))
            self.tokens_seen, self.minutes = before.tokens_seen or 0, before.training.get("minutes", 0.0)
        elif feature_head and recipe.fit_input:
            wanted, batches = FIT_ROWS * self.head.fc.in_features, []
            for batch in self._batches(0):
                if wanted <= 0:
                    break
                batches.append(batch)
                wanted -= sum(self.store.supervised(i) for i in batch)
            fit_input(self.head, self.loader, batches)
        if feature_head and recipe.scale_inputs and self.start is None:
            start_norms(self.head, sizes[1])
        self._make_optimizers(*sizes)
        self.workers.agree(self.head)
        if self.judge is not None:
            self.workers.agree(self.judge)

    def _make_optimizers(self, embedding: torch.Tensor, feature: torch.Tensor) -> None:
        if self.recipe.scale_inputs:
            condition(self.head, embedding, feature)
        self.optimizers = optimizers_for(self.head, self.recipe)

    def run(self, checkpoint_minutes: float, max_minutes: float | None = None, snapshots: int = 0) -> HeldOut:
        """Train to the end, or for `max_minutes` (a checkpoint is left, the head is written either way)."""
        started = saved = time.monotonic()
        before, first, figures = self.minutes, self.workers.first, None
        log = Log(self.out, self.step) if first else None
        with tqdm(total=self.steps, initial=self.step, unit="step", desc=self.recipe.method, file=sys.stderr, disable=not first) as bar:
            for epoch, number, group in self._plan(self.epoch, self.group):
                late = max_minutes is not None and (time.monotonic() - started) / 60 >= max_minutes
                entry, stop = self._train_step(group, stop=late)
                self.epoch, self.group, self.step = epoch, number + 1, self.step + 1
                now = time.monotonic()
                self.minutes = before + (now - started) / 60
                bar.update()
                if self._due(GLANCES):
                    figures = self.evaluate(GLANCE_TOKENS)
                    entry["held_out"] = figures.brief()
                    if first:
                        bar.write(f"step {self.step}: {figures}", file=sys.stderr)
                if log is not None and (self.step % LOG_EVERY == 0 or "held_out" in entry):
                    bar.set_postfix_str(f"loss {entry['loss']:.3f}, agreement {entry['agreement']}", refresh=False)
                    log.write({"step": self.step, "epoch": epoch, "minutes": round(self.minutes, 2), **entry})
                if self._due(snapshots):
                    snapshot = self.evaluate()
                    if first:
                        self._write_head(snapshot, self.out / str(self.tokens_seen))
                if first and (now - saved) / 60 >= checkpoint_minutes:
                    self.save()
                    saved = now
                if stop:
                    break
        figures = self.evaluate()
        if log is not None:
            log.write({"step": self.step, "minutes": round(self.minutes, 2), "held_out": figures.to_json()})
            log.close()
            self.save()
            self._write_head(figures, self.out)
        self.workers.wait()
        return figures

    def _due(self, times: int) -> bool:
        """Whether something that is done `times` times on the way, evenly, is due after this step."""
        parts = times + 1
        return self.step < self.steps and self.step * parts // self.steps > (self.step - 1) * parts // self.steps

    def _train_step(self, group: list[list[int]], stop: bool = False) -> tuple[dict[str, Any], bool]:
        """One optimizer step over a group of batches, of which this process takes its share.

        Returns:
            What is logged, and whether the first process wants to stop.
        """
        recipe, device = self.recipe, self.target.device
        rate = recipe.rate(self.step, self.steps)
        for optimizer in self.optimizers:
            for setting in optimizer.param_groups:
                setting["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        if self.judge is not None:
            self.judge_optimizer.zero_grad(set_to_none=True)
        width = len(STATISTICS) + len(ADVERSARY_STATISTICS)
        sums = torch.zeros(recipe.steps * width + 2, device=device)
        for index in range(self.workers.rank, len(group), self.workers.count):
            loss, statistics = self._batch_loss(group[index], index, 1 / len(group))
            loss.backward()
            sums[:-2] += statistics.flatten() / len(group)
            sums[-2] += loss.detach()
        sums[-1] = float(stop and self.workers.first)
        *statistics, total, stopping = self.workers.sum(sums).tolist()
        if not math.isfinite(total):
            raise DraftscopeError(
                f"the loss is not a number at step {self.step}; the last checkpoint in {self.out} is kept: lower --learning-rate"
            )
        self.workers.sum_gradients(self.head.parameters())
        if recipe.clip_value:
            torch.nn.utils.clip_grad_value_(self.head.parameters(), recipe.clip_value)
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip_norm or math.inf)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.judge is not None:
            self.workers.sum_gradients(self.judge.parameters())
            self.judge_optimizer.step()
        self.tokens_seen += sum(self.store.supervised(i) for batch in group for i in batch)
        names = STATISTICS + (ADVERSARY_STATISTICS if self.judge is not None else ())
        told = {name: [round(value, 4) for value in statistics[column::width]] for column, name in enumerate(names)}
        entry = {"loss": round(total / recipe.steps, 4), **told, "gradient_norm": round(norm.item(), 3), "learning_rate": rate}
        return {**entry, "tokens_seen": self.tokens_seen}, stopping > 0

    def _batch_loss(self, dialogues: list[int], index: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch's share of the loss that the head learns from, and its [draft steps, statistics]; the discriminator's
        gradients are added on the way."""
        recipe, device = self.recipe, self.target.device
        batch = self.loader.load(dialogues)
        features = batch.features
        if recipe.noise:
            # noise depends on the place in the training alone: not on what ran before, nor on the number of processes
            self.generator.manual_seed((recipe.seed * 1_000_003 + self.step) * 4099 + index)
            noise = torch.rand(features.shape, generator=self.generator, device=device, dtype=torch.float32)
            features = features + ((noise - 0.5) * 2 * recipe.noise).to(features.dtype)
        statistics = torch.zeros(recipe.steps, len(STATISTICS) + len(ADVERSARY_STATISTICS), device=device)
        total = torch.zeros((), device=device)
        with self._autocast(), parametrize.cached():
            outputs = self.student.outputs(batch, features, recipe.steps)
        listening = recipe.adversary_weight(self.step, self.steps)
        for step, output in enumerate(outputs):
            own, valid = batch.supervised(output), batch.valid * (batch.place >= step)  # a draft of m steps starts m pairs before
            lm_head = self.student.lm_head(step, self.loader.lm_head)
            loss, statistics[step, : len(STATISTICS)] = step_loss(
                own, batch.wanted, batch.teacher, valid, batch.counted * valid, lm_head, recipe.weights
            )
            if self.judge is not None:
                context = self.student.seen(batch, step)
                with self._autocast():
                    judged, recognised = discriminator_loss(self.judge, context, batch.wanted, own, valid, step)
                    (judged * share).backward()
                    self.judge.requires_grad_(False)
                    fooled = adversarial_loss(self.judge, context, own, valid, step)
                    self.judge.requires_grad_(True)
                loss = loss + listening * fooled
                statistics[step, len(STATISTICS) :] = torch.stack((fooled.detach(), judged.detach(), *recognised))
            # gradients of the aligned steps are summed, not averaged (HASS)
            total = total + recipe.step_decay**step * loss
        return total * share, statistics

    def evaluate(self, tokens: int | None = None) -> HeldOut:
        """Held-out figures, over about `tokens` supervised tokens or all of them."""
        chosen, left = [], math.inf if tokens is None else tokens
        for index in self.held:
            if left > 0:
                chosen.append(index)
                left -= self.store.supervised(index)
        steps = self.recipe.positions if self.recipe.family == "medusa" else EVAL_STEPS
        return measure(self.student, self.loader, chosen, steps, self.recipe.batch_tokens, self.draft_vocab is None, self.workers)

    def save(self) -> None:
        """Write the checkpoint aside, then rename it."""
        state = {
            "recipe": asdict(self.recipe),
            "data": self._data_mark(),
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "place": [self.epoch, self.group, self.step, self.tokens_seen, self.minutes],
        }
        if self.judge is not None:
            state |= {"judge": self.judge.state_dict(), "judge_optimizer": self.judge_optimizer.state_dict()}
        self.out.mkdir(parents=True, exist_ok=True)
        aside = self.out / (CHECKPOINT + ".part")
        try:
            torch.save(state, aside)
            aside.replace(self.out / CHECKPOINT)
        except (OSError, RuntimeError) as error:
            aside.unlink(missing_ok=True)
            raise DraftscopeError(f"no checkpoint could be written to {self.out}: {error} (the one before is kept)") from error

    def resume(self) -> bool:
        """Go on from the checkpoint in `out`; False where there is none."""
        path = self.out / CHECKPOINT
        if not path.exists():
            return False
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
            recipe, data, _ = state["recipe"], state["data"], state["optimizers"]
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise UsageError(f"{path} is no checkpoint that can be read: {error}; use another --out, or remove it") from error
        other = [name for name, value in asdict(self.recipe).items() if recipe.get(name) != value]
        other += ["the text or the number of processes"] if data != self._data_mark() else []
        if other:
            raise UsageError(f"{path} is of another training ({', '.join(other)} differ): use another --out, or the same settings")
        ones = torch.ones(self.target.hidden_size, device=self.target.device)
        self._make_optimizers(ones, ones)  # the sizes are in the checkpoint
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.judge is not None:
            self.judge.load_state_dict(state["judge"])
            self.judge_optimizer.load_state_dict(state["judge_optimizer"])
        self.epoch, self.group, self.step, self.tokens_seen, self.minutes = state["place"]
        return True

    def _write_head(self, figures: HeldOut, folder: Path) -> None:
        before = self.start[1].training if self.start is not None else {}
        meta = HeadMeta(
            method=self.recipe.method,
            target=self.target.name,
            align_steps=self.recipe.align_steps,
            adversary=self.recipe.adversary > 0,
            tokens_seen=self.tokens_seen,
            training={
                **asdict(self.recipe),
                "text_tokens": int(self.store.answer.sum()),
                "minutes": round(self.minutes, 1),
                "draft_vocab_coverage": self.coverage,
                "command": " && ".join(filter(None, (before.get("command"), self.command))),
                **({"stage_before": before} if before else {}),
            },
            results={"held_out": figures.to_json()},
        )
        try:
            self.student.save(folder, meta, self.draft_vocab, figures.ranks)
        except OSError as error:
            raise DraftscopeError(f"the head can't be written to {folder}: {error.strerror or error}") from error

    def _plan(self, epoch: int = 0, group: int = 0) -> Iterator[tuple[int, int, list[list[int]]]]:
        """(epoch, number, batches) of every optimizer step from a place on: whole epochs, or until enough tokens are seen."""
        size, seen = self.recipe.accumulate * self.workers.count, 0
        for current in range(self.recipe.epochs if self.recipe.tokens is None else 1 << 30):
            batches = self._batches(current)
            for number, start in enumerate(range(0, len(batches), size)):
                chosen = batches[start : start + size]
                if (current, number) >= (epoch, group):
                    yield current, number, chosen
                if self.recipe.tokens is not None:
                    seen += sum(self.store.supervised(i) for batch in chosen for i in batch)
                    if seen >= self.recipe.tokens:
                        return

    def _batches(self, epoch: int) -> list[list[int]]:
        lengths = [self.store.length(i) for i in self.used]
        batches = length_batches(lengths, self.recipe.batch_tokens, random.Random(f"{self.recipe.seed}/{epoch}"))
        return [[self.used[i] for i in batch] for batch in batches]

    def _data_mark(self) -> list[Any]:
        return [self.store.digest, len(self.store), self.recipe.accumulate * self.workers.count]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.loader.dtype == torch.bfloat16)


def optimizers_for(head: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW (EAGLE's betas) for all weights, or Muon for the matrices and AdamW for the rest; one learning rate for both."""
    betas, decay, rate = (0.9, 0.95), recipe.weight_decay, recipe.learning_rate
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(head.parameters(), rate, betas=betas, weight_decay=decay)]
    matrices = [parameter for parameter in head.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in head.parameters() if parameter.ndim != 2]
    # steps of the size that AdamW's have, so that its learning rates hold (Moonlight, 2502.16982)
    muon = torch.optim.Muon(matrices, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, *([torch.optim.AdamW(rest, rate, betas=betas, weight_decay=decay)] if rest else [])]
