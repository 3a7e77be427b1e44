"""The step loop: draft, verify, accept, commit. Plain decoding is the same loop without a head."""

import platform
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import islice
from typing import TypeVar

import torch

from decoding import processor
from decoding.accept import Accepted, Draws, accept, target_probabilities
from decoding.chat import Message, encode_prompt
from decoding.errors import DraftscopeError, UsageError
from decoding.head import DraftHead, DraftSession, DraftTree
from decoding.records import AUTOREGRESSIVE, Environment, FinishReason, Run, Settings, Step
from decoding.target import Target
from decoding.tree import ancestor_mask

Key = TypeVar("Key", bound=Hashable)

Prompt = str | Sequence[Message] | Sequence[int]


class Generation:
    """One request. Iterating it decodes: a Step for each target forward, as it happens; `run` is the record so far.

    Closing the iterator, or a `cancelled` that turns true, ends the run within one step; what was made is kept.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead | None,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        draws: Draws | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        drift: bool = False,
    ) -> None:
        """
        Args:
            head: None = plain decoding.
            prompt: a user's text (the chat template is applied), a conversation, or raw token ids.
            draws: the source of random numbers; None = seeded from the settings.
            drift: also record how far the head's features and distributions are from the target's (costs record_ms).

        Raises:
            UsageError: an empty prompt, one that does not fit the context, or settings that contradict each other.
        """
        self.target, self.head = target, head
        self.settings = (settings or Settings()).resolved(head.tree if head else None)
        self.prompt_ids, self.prompt_text = _prompt_ids(target, prompt)
        room = target.context_length - len(self.prompt_ids)
        if room < 1:
            raise UsageError(
                f"the prompt has {len(self.prompt_ids)} tokens, the context of {target.name} holds {target.context_length}: shorten it"
            )
        self.limit = min(self.settings.max_new_tokens, room)
        stops = self.settings.stop_token_ids
        self.stop_ids = target.stop_token_ids if stops is None else frozenset(stops)
        self.draws = draws or Draws(self.settings.seed)
        self.cancelled, self.drift = cancelled, drift
        self.steps: list[Step] = []
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason = "cancelled"  # what it is until it finishes otherwise
        self.error: str | None = None
        self.prefill_ms = 0.0
        self._texts: dict[int, str] = {}
        self._elapsed = 0.0  # ms of work; stands still while the consumer holds a step
        capacity = len(self.prompt_ids) + self.limit
        self._session: DraftSession | None = head.start(capacity, self.settings.tree) if head else None
        rows = 1 + (self.settings.tree_nodes if head else 0)
        self._cache = target.new_cache(capacity + rows, [rows])
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def __iter__(self) -> Iterator[Step]:
        try:
            if self.cancelled():
                return
            self._prefill()
            while not self._finished():
                if self.cancelled():
                    return
                step = self._step()
                self.steps.append(step)
                self.output_ids += step.token_ids
                finished = self._finished()
                yield step
                if finished:
                    break
        except (DraftscopeError, torch.OutOfMemoryError, MemoryError) as error:
            self.finish_reason = "error"
            if isinstance(error, DraftscopeError):
                self.error = str(error)
                raise
            self.error = "out of memory: a smaller tree, fewer tokens or a half-precision dtype needs less"
            raise DraftscopeError(self.error) from error
        finally:
            self._session = self._cache = self._features = None  # frees what the run held, also when it is cancelled

    @property
    def run(self) -> Run:
        """The record of what was done so far."""
        head = self.head
        return Run(
            target=self.target.name,
            head=head.name if head else None,
            method=head.info.method if head else AUTOREGRESSIVE,
            head_info=head.info if head else None,
            settings=self.settings,
            environment=environment(self.target),
            created=self._created,
            prompt_ids=self.prompt_ids,
            prompt_text=self.prompt_text,
            prefill_ms=self.prefill_ms,
            first_id=self.output_ids[0] if self.output_ids else None,
            steps=self.steps,
            output_ids=self.output_ids,
            text=self.target.tokenizer.decode(self.output_ids, skip_special_tokens=True) if self.target.tokenizer else "",
            token_texts={token_id: self.token_text(token_id) for token_id in self._used_ids()},
            finish_reason=self.finish_reason,
            error=self.error,
        )

    def token_text(self, token_id: int) -> str:
        """Text of one token, see Target.token_text."""
        if token_id not in self._texts:
            self._texts[token_id] = self.target.token_text(token_id)
        return self._texts[token_id]

    def _used_ids(self) -> list[int]:
        used = {*self.prompt_ids, *self.output_ids}
        for step in self.steps:
            used.update(step.node_ids, step.runner_up_ids, (step.bonus_id,))
        return sorted(used)

    def _finished(self) -> bool:
        last = self.output_ids[-1]
        if last in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.limit:
            self.finish_reason = "length"
        else:
            return False
        return True

    @torch.inference_mode()
    def _prefill(self) -> None:
        """Target over the prompt: features of all positions, logits of the last one, the first root."""
        clock = _Clock(self.target)
        ids = torch.tensor(self.prompt_ids, device=self.target.device)
        features = self.target.forward(ids, torch.arange(len(ids), device=ids.device), None, self._cache)
        first = accept(self.target.logits(features[-1:]), _no_tree(ids.device), self.settings, self.draws).bonus_id
        self.output_ids.append(first)
        self._root = first
        self._features, self._follow_ids = features, torch.cat((ids[1:], ids.new_tensor([first])))
        self.prefill_ms = self._elapsed = clock.lap()

    @torch.inference_mode()
    def _step(self) -> Step:
        target, cache = self.target, self._cache
        start_ms, context = self._elapsed, cache.length
        clock = _Clock(target)

        # 1. draft: extend the head with what was committed, propose a tree below the root
        if self._session is None:
            tree = _no_tree(target.device)
        else:
            tree = self._session.propose(self._features, self._follow_ids)
            room = target.context_length - context - 1
            if room < self.settings.tree_depth:  # no node may stand beyond the target's context
                tree = tree.first(int((tree.depths <= room).sum()))
        draft_ms = clock.lap()

        # 2. verify: one target forward over root + nodes; each sees the committed tokens, its ancestors and itself
        ids = torch.cat((tree.token_ids.new_tensor([self._root]), tree.token_ids))
        positions = torch.cat((tree.depths.new_zeros(1), tree.depths)) + context
        tail = ancestor_mask(tree.parents, self.settings.tree_depth) if len(tree) else None
        features = target.forward(ids, positions, tail, cache)
        logits = target.logits(features)
        verify_ms = clock.lap()

        # 3. accept
        accepted = accept(logits, tree, self.settings, self.draws)
        accept_ms = clock.lap()

        # 4. commit: keep root + accepted rows, in place; their features go to the next draft
        rows = torch.tensor([0, *(node + 1 for node in accepted.nodes)], device=ids.device)
        cache.commit(context, None if accepted.nodes == list(range(len(accepted.nodes))) else rows, len(rows))
        self._features = features[rows]
        self._follow_ids = torch.cat((ids[rows[1:]], ids.new_tensor([accepted.bonus_id])))
        commit_ms = clock.lap()

        record = self._record(tree, features, logits, rows, accepted, context)
        self._root = accepted.bonus_id
        record_ms = clock.lap()
        self._elapsed += draft_ms + verify_ms + accept_ms + commit_ms + record_ms
        return Step(
            **record,
            start_ms=start_ms,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            accept_ms=accept_ms,
            commit_ms=commit_ms,
            record_ms=record_ms,
        )

    def _record(
        self, tree: DraftTree, features: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, accepted: Accepted, context: int
    ) -> dict:
        """The untimed fields of the Step (this is neither drafting nor verifying: its cost stands apart, in record_ms)."""
        token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
        logprobs = tree.logprobs.tolist()
        if any(value != value for value in logprobs):
            raise DraftscopeError(f"head {self.head.name}'s logits are not numbers (overflow): use --dtype bfloat16 or float32")
        # a node was reached where its parent was accepted; at temperature 0 all children of an accepted node are compared
        reached = {-1, *accepted.nodes}
        path = set(accepted.nodes)
        tested = accepted.draws.keys() if self.settings.temperature else range(len(token_ids))
        status = [
            "accepted" if node in path else "rejected" if parent in reached and node in tested else "unreached"
            for node, parent in enumerate(parents)
        ]
        emitted = [*(token_ids[node] for node in accepted.nodes), accepted.bonus_id]
        keep = min(len(emitted), self.limit - len(self.output_ids))
        stop = next((place + 1 for place, token_id in enumerate(emitted) if token_id in self.stop_ids), keep)
        fields = {
            "index": len(self.steps),
            "root_id": self._root,
            "node_ids": token_ids,
            "parents": parents,
            "depths": tree.depths.tolist(),
            "draft_logprobs": [min(value, 0.0) for value in logprobs],
            "scores": [min(value, 0.0) for value in tree.scores.tolist()],
            "target_probs": _node_probabilities(logits, tree, self.settings),
            "status": status,
            "accepted": accepted.nodes,
            "bonus_id": accepted.bonus_id,
            "token_ids": emitted[: min(keep, stop)],
            "context_length": context,
        }
        if self.settings.temperature:
            fields["draws"] = [accepted.draws.get(node) for node in range(len(token_ids))]
        else:
            best = logits[rows].float().topk(min(2, logits.shape[-1]), dim=-1)
            fields["margins"] = (best.values[:, 0] - best.values[:, -1]).tolist()
            chosen = torch.tensor(emitted, device=best.indices.device)  # of two equal logits either may be listed first
            fields["runner_up_ids"] = torch.where(best.indices[:, 0] == chosen, best.indices[:, -1], best.indices[:, 0]).tolist()
        if self.drift and tree.features is not None:
            fields |= self._drift(tree.features()[rows], features[rows], logits[rows])
        return fields

    def _drift(self, own: torch.Tensor, features: torch.Tensor, logits: torch.Tensor) -> dict[str, list[float | None]]:
        """Head against target along root + accepted nodes: cosine and distance of features, overlap of distributions."""
        drafted = ~own.isnan().any(dim=-1)
        cosine = torch.cosine_similarity(own.float(), features.float(), dim=-1)
        distance = (own.float() - features.float()).norm(dim=-1)
        p, q = (torch.softmax(rows.float(), dim=-1) for rows in (logits, self.head.draft_logits(own.nan_to_num())))
        measured = {"drift_cosine": cosine, "drift_distance": distance, "overlap": torch.minimum(p, q).sum(-1)}
        known = drafted.tolist()
        return {name: [v if ok else None for v, ok in zip(values.tolist(), known, strict=True)] for name, values in measured.items()}


def _node_probabilities(logits: torch.Tensor, tree: DraftTree, settings: Settings) -> list[float]:
    """Target probability of every node's token at its parent; only rows that have children are normalised."""
    if not len(tree):
        return []
    rows, row_of = torch.unique(tree.parents + 1, return_inverse=True)
    if settings.temperature == 0:
        parents = logits[rows].float()
        chosen = parents[row_of, tree.token_ids] - parents.logsumexp(dim=-1)[row_of]
        return chosen.exp().tolist()
    return target_probabilities(logits[rows], settings)[row_of, tree.token_ids].tolist()


def _no_tree(device: torch.device) -> DraftTree:
    empty = torch.empty(0, dtype=torch.long, device=device)
    return DraftTree(empty, empty, empty, empty.float(), empty.float())


class _Clock:
    """Milliseconds between laps, with the device's work done at each lap."""

    def __init__(self, target: Target) -> None:
        self._device = target.device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        last, self._last = self._last, self._now()
        return 1000 * (self._last - last)


def _prompt_ids(target: Target, prompt: Prompt) -> tuple[list[int], str]:
    if len(prompt) == 0:
        raise UsageError("the prompt is empty: type something for the target to answer")
    raw = not isinstance(prompt, str) and all(type(item) is int for item in prompt)
    if not raw:
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(m.get("content")) for m in prompt if isinstance(m, dict))
        return encode_prompt(target.tokenizer, prompt), text
    ids = list(prompt)
    outside = next((token_id for token_id in ids if not 0 <= token_id < target.vocab_size), None)
    if outside is not None:
        raise UsageError(f"token id {outside} is outside the vocabulary of {target.name} (0 to {target.vocab_size - 1})")
    return ids, ""


def in_turns(runs: Mapping[Key, Iterable[Step]], turn: int = 3) -> Iterator[tuple[Key, Step]]:
    """The steps of several runs, `turn` of each before the next has its turn: a machine that slows down for a while slows
    all of them. A run's clock stands still while others have their turn."""
    going = {key: iter(run) for key, run in runs.items()}
    while going:
        for key, run in list(going.items()):
            steps = 0
            for step in islice(run, turn):
                steps += 1
                yield key, step
            if steps < turn:
                del going[key]


def environment(target: Target) -> Environment:
    """Where this process measures."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor.name()
    return Environment(
        device=str(device),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        machine=name,
        notes=(*target.notes, *target.forward_notes),
        versions={"python": platform.python_version(), "torch": torch.__version__, "transformers": version("transformers")},
    )


def stream(
    target: Target,
    head: DraftHead | None,
    prompt: Prompt,
    settings: Settings | None = None,
    *,
    draws: Draws | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """One Step per target forward, as it happens (see Generation for the arguments)."""
    return iter(Generation(target, head, prompt, settings, draws=draws, cancelled=cancelled))


def generate(
    target: Target,
    head: DraftHead | None,
    prompt: Prompt,
    settings: Settings | None = None,
    *,
    draws: Draws | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Run:
    """Decode to the end and return the record (see Generation for the arguments)."""
    generation = Generation(target, head, prompt, settings, draws=draws, cancelled=cancelled)
    for _ in generation:
        pass
    return generation.run
