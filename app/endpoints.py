"""The running app's API: named, typed, documented; also its MCP tools."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import gradio as gr

from app.comparison import Comparison, Lane, Request
from app.device import Device
from app.log import told
from app.models import Models
from app.requests import new_token
from decoding.records import AUTOREGRESSIVE, Settings

GONE_SECONDS = 15.0  # an answer of which nothing is taken for so long is nobody's


class Follower:
    """Whether anybody takes what an HTTP client asked for: it may post and never come back."""

    def __init__(self, request: gr.Request | None) -> None:
        asked = request.request if request is not None else None
        self._told = asked.app.get_blocks()._queue.pending_messages_per_session if asked is not None else {}
        self._session = request.session_hash if request is not None else None
        self._given, self._taken, self._since = 0, 0, time.monotonic()

    def gone(self) -> bool:
        """Called after each update that was given: whether none has been taken for a while."""
        self._given += 1
        waiting = self._told.get(self._session)
        taken = self._given - (waiting.qsize() if waiting is not None else 0)
        if waiting is None or taken > self._taken:
            self._taken, self._since = taken, time.monotonic()
        return time.monotonic() - self._since > GONE_SECONDS


def add_endpoints(models: Models, device: Device, compare_as: Callable[[Request], Comparison]) -> None:
    """Add /compare, /methods and /targets to the Blocks that is being built.

    Args:
        device: the queue that all work shares.
        compare_as: how a request becomes a Comparison (see app.zero.comparisons).
    """

    async def compare(
        prompt: str,
        methods: list[str],
        target: str = models.source,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        tree_depth: int = 0,
        tree_top_k: int = 0,
        tree_nodes: int = 0,
        request: gr.Request | None = None,
    ) -> AsyncIterator[dict]:
        """Generate with each method on the same prompt, one after the other on the device, and tell what happens as it happens.

        Args:
            prompt: A user's text; the target's chat template is applied to it.
            methods: Names from /methods: one at least, four at most unless this server says otherwise.
                "autoregressive" is plain decoding, which the speed-up is measured against.
            target: A name from /targets.
            max_new_tokens: The most tokens that are generated.
            temperature: 0 is greedy: the output then equals plain decoding.
            top_p: Nucleus sampling, 1 is off.
            top_k: Top-k sampling, 0 is off.
            seed: Seed of the draws.
            tree_depth: Drafted levels; 0 is the head's own.
            tree_top_k: Children per node and beam width; 0 is the head's own.
            tree_nodes: Drafted nodes that are verified, root not counted; 0 is the head's own.

        Returns:
            Lane updates {"type": "lanes", "ahead", "lanes": [{"method", "head", "state", "tokens", "tau", "tokens_per_second", "speed_up",
            "token_ids"}]}, at most five a second; "ahead" counts earlier requests that it waits for. The last item is
            {"type": "runs", "runs": [...]}, the Run records.
        """
        tree = {"tree_depth": tree_depth, "tree_top_k": tree_top_k, "tree_nodes": tree_nodes}
        try:
            settings = Settings(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                **{name: value for name, value in tree.items() if value},
            )
            comparison = compare_as(Request(prompt, methods, target, settings, new_token()))
            job = device.submit(comparison)
        except Exception as error:
            raise gr.Error(told(error), print_exception=False) from error

        def lanes() -> dict:
            return {"type": "lanes", "ahead": device.ahead(job), "lanes": [_lane(comparison, lane) for lane in comparison.lanes]}

        async with aclosing(job.updates(lanes, lanes())) as updates:
            follower = Follower(request)
            async for update in updates:
                yield update
                if follower.gone():
                    return  # closes the updates, which stops the job
        if comparison.failed:
            raise gr.Error(comparison.note, print_exception=False)
        yield {"type": "runs", "runs": [run.model_dump(mode="json", by_alias=True) for run in comparison.runs]}

    def methods(target: str = models.source) -> list:
        """The methods that /compare takes for a target.

        Args:
            target: A name from /targets.

        Returns:
            A list of {"name", "method", "label", "layers"}; name is what /compare takes.
        """
        return [
            {"name": offer.source, "method": offer.method, "label": offer.label, "layers": offer.layers} for offer in models.offers(target)
        ]

    def targets() -> list:
        """The targets that this server knows, its own first, and which of them /compare takes.

        Returns:
            A list of {"name", "title", "available", "reason", "note", "needs_bytes", "licence", "gated", "tested", "loaded"};
            name is what /compare takes, reason says why one is not available here.
        """
        return [
            {
                "name": offer.source,
                "title": offer.title,
                "available": offer.reason is None,
                "reason": offer.reason,
                "note": offer.note,
                "needs_bytes": offer.needs.total if offer.needs else None,
                "licence": offer.licence,
                "gated": offer.gated,
                "tested": offer.tested,
                "loaded": models.ready(offer.source),
            }
            for offer in models.target_offers()
        ]

    gr.api(compare, api_name="compare", concurrency_limit=None)
    gr.api(methods, api_name="methods", queue=False)
    gr.api(targets, api_name="targets", queue=False)


def _lane(comparison: Comparison, lane: Lane) -> dict[str, Any]:
    """What an update says of a lane. Its list of ids only grows: Gradio sends differences, and its client (2.7) fails on a
    list that loses several items at once."""
    figures = comparison.figures(lane)
    return {
        "method": lane.view["method"],
        "head": None if lane.source == AUTOREGRESSIVE else lane.source,
        "state": lane.view["state"],
        "tokens": len(lane.output_ids),
        "tau": figures["tau"],
        "tokens_per_second": figures["tps"],
        "speed_up": figures["speedup"],
        "token_ids": list(lane.output_ids),
    }
