"""What this server can run: targets and heads, offered without importing torch, loaded when they are first used."""

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from app.methods import lane_label, method
from decoding.errors import DraftscopeError, UsageError
from decoding.records import AUTOREGRESSIVE, Settings

if TYPE_CHECKING:
    from decoding.head import DraftHead
    from decoding.target import Target

EMBEDDED = "embedded"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "heads"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Offer:
    """One entry of the method list: `source` is what load_head takes, "autoregressive" is plain decoding."""

    source: str
    method: str
    label: str
    layers: int | None = None


PLAIN = Offer(AUTOREGRESSIVE, AUTOREGRESSIVE, method(AUTOREGRESSIVE).label)


def shipped_heads(folder: Path = SHIPPED) -> list[tuple[str, Offer]]:
    """(target, offer) of every head in `folder`, read from its config alone: `heads` would import torch for it."""
    found = []
    for config in sorted(folder.glob("*/config.json")):
        try:
            told = json.loads(config.read_text(encoding="utf-8"))
            section = told["draftscope"]
            offer = Offer(
                config.parent.name, section["method"], lane_label(section["method"], config.parent.name), told.get("num_hidden_layers")
            )
            found.append((section["target"], offer))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a head of ours: load_head will say what is wrong with it when it is asked for by name
    order = {EMBEDDED_NAME: 0}
    return sorted(found, key=lambda pair: (order.get(pair[0], 1), pair[1].layers or 0, pair[1].source))


@dataclass
class Models:
    """The registry of one server: one target at a time, its heads beside it."""

    source: str = EMBEDDED
    device: str = "auto"
    dtype: str = "auto"
    extra_heads: tuple[str, ...] = ()
    allow_custom: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _target: "Target | None" = None
    _loaded: str | None = None
    _heads: dict[str, "DraftHead"] = field(default_factory=dict)
    _warm: set[str] = field(default_factory=set)
    _preloading: bool = False

    def targets(self) -> list[str]:
        """Names of the targets a person may choose."""
        return [self.source]

    def offers(self, target: str | None = None) -> list[Offer]:
        """Plain decoding and the heads for a target, in the order of the page."""
        name = EMBEDDED_NAME if (target or self.source) == EMBEDDED else Path(target or self.source).name
        shipped = [offer for made_for, offer in shipped_heads() if made_for == name]
        extra = [Offer(source, "other", Path(source).name) for source in self.extra_heads]
        return [PLAIN, *shipped, *extra]

    def check(self, target: str, methods: list[str]) -> None:
        """Refuse names that this server does not offer.

        Raises:
            UsageError: naming the thing and what is possible.
        """
        if not self.allow_custom and target not in self.targets():
            raise UsageError(f"unknown target {target!r}: this server offers {', '.join(self.targets())}")
        known = [offer.source for offer in self.offers(target)]
        for name in methods:
            if name not in known and not self.allow_custom:
                raise UsageError(f"unknown method {name!r}: this server offers {', '.join(known)}")
        if not 1 <= len(set(methods)) <= 4:
            raise UsageError(f"{len(set(methods))} methods chosen: choose 2 to 4, plain decoding among them to measure the speed-up")

    def ready(self, target: str) -> bool:
        return self._loaded == target

    def target(self, source: str) -> "Target":
        """The target, loaded on the first call; another one loaded before is dropped.

        Raises:
            DraftscopeError, UsageError: as load_target.
        """
        with self._lock:
            if self._loaded != source:
                from decoding import load_target  # torch: imported when it is needed, not before the first view

                self._heads.clear()
                self._warm.clear()
                self._target = self._loaded = None
                self._target = load_target(source, self.device, self.dtype)
                self._loaded = source
            assert self._target is not None
            return self._target

    def head(self, name: str, target: "Target") -> "DraftHead | None":
        """The head of a method, bound to the target; None = plain decoding."""
        if name == AUTOREGRESSIVE:
            return None
        with self._lock:
            if name not in self._heads:
                from heads import load_head

                self._heads[name] = load_head(name, target)
            return self._heads[name]

    def warm_up(self, name: str, target: "Target", head: "DraftHead | None") -> None:
        """A few tokens before anything is timed, once for each head."""
        if name in self._warm:
            return
        from decoding import generate

        prompt = [token % target.vocab_size for token in range(1, 17)]
        generate(target, head, prompt, Settings(max_new_tokens=WARM_UP_TOKENS, stop_token_ids=()))
        self._warm.add(name)

    def preload(self, delay: float = 0.0) -> None:
        """Load the target and its shipped heads in the background, once, so that the first Run does not wait for them."""
        if self._preloading:
            return
        self._preloading = True

        def load() -> None:
            time.sleep(delay)
            try:
                target = self.target(self.source)
                for offer in self.offers():
                    self.head(offer.source, target)
            except DraftscopeError:
                return  # the first Run says the same, to the person who asked

        threading.Thread(target=load, name="preload", daemon=True).start()
