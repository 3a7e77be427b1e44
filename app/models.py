"""What this server can run: targets and heads, offered without importing torch, loaded when they are first used."""

import re
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from app.log import event
from app.offers import EMBEDDED, Offer, TargetOffer, head_offers, target_offers, this_machine
from decoding.errors import DraftscopeError, Stopped, UsageError
from decoding.memory import free_bytes, gigabytes
from decoding.records import AUTOREGRESSIVE, Settings
from decoding.space import on_zero_gpu

if TYPE_CHECKING:
    from decoding.head import DraftHead
    from decoding.hub import Progress
    from decoding.target import Target

WARM_UP_TOKENS = 8
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")


@dataclass
class Models:
    """The registry of one server: one target at a time, its heads beside it."""

    source: str = EMBEDDED
    device: str = "auto"
    dtype: str = "auto"
    extra_heads: tuple[str, ...] = ()
    allow_custom: bool = False  # visitors may name hub ids that are not offered
    allow_local: bool = True  # ... and folders
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _target: "Target | None" = None
    _loaded: str | None = None
    _heads: dict[str, "DraftHead"] = field(default_factory=dict)
    _warm: set[str] = field(default_factory=set)
    _fitting: "Iterator[object] | None" = None

    def target_offers(self) -> list[TargetOffer]:
        """The targets a person sees, with the reason where one can't be chosen here."""
        return target_offers(self.source, self.device, self.dtype)

    def targets(self) -> list[str]:
        """Names of the targets a person may choose."""
        return [offer.source for offer in self.target_offers() if offer.reason is None]

    def offers(self, target: str | None = None) -> list[Offer]:
        """Plain decoding and the heads for a target, in the order of the page. Heads that the operator named belong to the
        server's own target."""
        target = target or self.source
        extra = [Offer(source, "other", Path(source).name) for source in self.extra_heads] if target == self.source else []
        return [*head_offers(target), *extra]

    def check(self, target: str, methods: Sequence[str]) -> None:
        """Refuse names that this server does not offer.

        Raises:
            UsageError: naming the thing and what is possible.
        """
        if target not in self.targets():
            self._foreign("target", target, self.targets())
        known = [offer.source for offer in self.offers(target)]
        for name in methods:
            if name not in known:
                self._foreign("method", name, known)

    def _foreign(self, what: str, name: str, known: list[str]) -> None:
        if not self.allow_custom:
            raise UsageError(f"unknown {what} {name[:80]!r}: this server offers {', '.join(known)}")
        if not self.allow_local and (not HUB_ID.fullmatch(name) or Path(name).exists()):
            raise UsageError(f"{what} {name[:80]!r} is no hub id such as 'org/name': this server takes those, and no folders")

    def ready(self, target: str, methods: Sequence[str] = ()) -> bool:
        """Whether a target and the heads of these methods are loaded."""
        return self._loaded == target and all(name in self._heads for name in methods if name != AUTOREGRESSIVE)

    def fetch(self, source: str, progress: "Progress") -> None:
        """Have the files of a target here. Nobody waits for it but who asks: another target is used meanwhile.

        Raises:
            DraftscopeError, UsageError: as load_target.
        """
        from decoding.loading import find_target

        find_target(source, progress)

    def target(self, source: str, progress: "Progress | None" = None) -> "Target":
        """The target, loaded on the first call in place of the one that was loaded before.

        The old one goes when the new one is there. Where memory does not hold both it goes first, and comes back if the
        new one can't be loaded: after a failure the server works as before.

        Raises:
            DraftscopeError, UsageError: as load_target.
        """
        with self._lock:
            if self._loaded != source:
                self._switch(source, progress)
            assert self._target is not None
            return self._target

    def memory_line(self) -> str:
        """What is loaded, and how much memory there is."""
        if on_zero_gpu():
            return "A GPU is borrowed for every run (ZeroGPU); the target waits in the CPU's memory."
        if self._target is None:
            return f"Nothing is loaded yet. This machine has {this_machine(self.device)}."
        place = self._target.device
        size, free = self._target.weights_bytes, free_bytes(str(place))
        return f"Loaded: {self._target.name}, {gigabytes(size)} of weights on {place}, {gigabytes(free)} free there."

    def _switch(self, source: str, progress: "Progress | None") -> None:
        from decoding.hub import silent
        from decoding.loading import fits, load_target  # torch: imported when it is needed, not before the first view

        kept, tell = self._loaded, progress or silent
        if kept is not None and not fits(source, self.device, self.dtype, tell):
            self._drop()
        try:
            target = load_target(source, self.device, self.dtype, tell)
        except (DraftscopeError, Stopped) as error:
            failure = error
            chain: BaseException | None = error
            while chain is not None:  # the frames of what failed hold what was read so far
                traceback.clear_frames(chain.__traceback__)
                chain = chain.__cause__
        else:
            self._drop()
            self._target, self._loaded = target, source
            self._fitting = self._fit(target) if source == self.source else None
            return
        if kept is not None and self._target is None:
            self._target, self._loaded = load_target(kept, self.device, self.dtype, tell), kept
        raise failure

    def _drop(self) -> None:
        """Let go of the target and its heads, and of the memory they had."""
        from decoding.loading import release_memory

        self._heads.clear()
        self._warm.clear()
        self._target = self._loaded = self._fitting = None
        release_memory()

    def own_offers(self) -> list[Offer]:
        """The methods of the server's own target that need no fetching but what the operator named."""
        return [offer for offer in self.offers() if not offer.released]

    def head(self, name: str, target: "Target", progress: "Progress | None" = None) -> "DraftHead | None":
        """The head of a method, bound to the target; None = plain decoding."""
        if name == AUTOREGRESSIVE:
            return None
        with self._lock:
            if name not in self._heads:
                from decoding.hub import silent
                from heads import load_head

                self._heads[name] = load_head(name, target, progress or silent)
            return self._heads[name]

    def fit_trees(self) -> bool:
        """A step of choosing the trees that fit this machine, where those of the loaded heads are another kind of machine's and
        what they catch is known; False: nothing is left to do."""
        if self._fitting is not None and next(self._fitting, self) is self:
            self._fitting = None
        return self._fitting is not None

    def _fit(self, target: "Target") -> Iterator[object]:
        from decoding.tuning import can_fit, fitting

        for offer in self.own_offers():
            try:
                head = self.head(offer.source, target)
            except DraftscopeError:
                continue  # told to who asks for it
            if head is None or not can_fit(target, head):
                continue
            for tuned in fitting(target, head):
                yield tuned
                if tuned is not None:
                    head.tree = tuned.tree
                    event("fit", head=head.name, tree=list(tuned.tree), speed_up=round(tuned.speed_up, 2))

    def warm_up(self, name: str, target: "Target", head: "DraftHead | None") -> None:
        """A few tokens before anything is timed, once for each head."""
        if name in self._warm:
            return
        from decoding import generate

        prompt = [token % target.vocab_size for token in range(1, 17)]
        generate(target, head, prompt, Settings(max_new_tokens=WARM_UP_TOKENS, stop_token_ids=()))
        self._warm.add(name)


class Preload:
    """Device work: load the target and its shipped heads, so that the first Run does not wait for them."""

    def __init__(self, models: Models) -> None:
        self.models, self.stopped = models, threading.Event()
        self.doing = "the target is made ready"

    def work(self) -> Iterator[bool]:
        try:
            target = self.models.target(self.models.source, self._tell)
            for offer in self.models.own_offers():
                yield False
                if self.stopped.is_set():
                    return
                self.models.head(offer.source, target)
        except (DraftscopeError, Stopped):
            return  # the first Run says the same, to the person who asked

    def _tell(self, text: str, share: float | None) -> None:
        if self.stopped.is_set():
            raise Stopped
        self.doing = text

    def finish(self) -> None:
        """Nobody waits for it."""
