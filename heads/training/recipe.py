"""What is trained and how: a method is a row of defaults, every field can be set by hand."""

import math
from dataclasses import dataclass, replace
from typing import Any

from decoding.errors import UsageError
from heads.training.losses import LossWeights


@dataclass(frozen=True)
class Recipe:
    """Settings of one training."""

    method: str
    family: str = "feature"  # the network: "feature" (EAGLE, HASS) or "medusa"
    layers: int = 1  # K of KOALA: decoder layers, or residual blocks per position
    align_steps: int = 1  # HASS; 1 = EAGLE
    positions: int = 4  # Medusa: future positions
    own_lm_head: bool = False  # Medusa: one per position instead of the target's
    feature_weight: float = 10.0  # beside soft_weight as in EAGLE (1 and 0.1); HASS: 1, its heads learn to live with their own features
    soft_weight: float = 1.0
    top_weight: float = 0.0  # HASS: 1
    top_k: int = 10
    step_decay: float = 1.0  # weight of draft step m is step_decay ** m (Medusa: 0.8)
    hard_labels: bool = False  # learn the text's tokens (Medusa) instead of the target's distributions
    # KOALA does not publish its adversarial settings; these are ours. The lambdas below are what `heads ablate` and trials
    # beside it left: 1 costs an EAGLE-type head 1.5 % of its chain; Medusa's guesses are told from features at once, and
    # listening to that judge costs more the larger lambda is
    adversary: float = 0.0  # lambda; 0 = supervised only
    adversary_rate: float = 3e-4  # learning rate of the discriminator
    adversary_ramp: float = 0.2  # share of the steps over which lambda grows from 0
    fit_input: bool = True  # a FeatureHead starts as the best linear guess of the next feature
    scale_inputs: bool = True  # matrices are trained in coordinates where every input has size 1
    noise: float = 0.1  # uniform, on the input features (EAGLE)
    optimizer: str = "muon"  # for the matrices (Jordan 2024), AdamW for the rest; "adamw": for all, as in the papers
    learning_rate: float = 1e-3  # Medusa: 3e-3
    schedule: str = "linear"  # to zero: the last tenth of the way, at small rates, is worth much (README)
    warm_up: float = 0.04  # share of the steps
    batch_tokens: int = 1024  # small: with little text the number of steps counts
    accumulate: int = 1  # batches per optimizer step and process
    epochs: int = 2
    tokens: int | None = None  # supervised tokens to see, instead of epochs
    draft_vocab: int | None = None
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    clip_value: float = 0.0  # EAGLE and HASS: 0.5, and no norm
    seed: int = 0
    start: str | None = None  # a head whose weights are the first ones (a second stage)

    @property
    def weights(self) -> LossWeights:
        return LossWeights(self.feature_weight, self.soft_weight, self.top_weight, self.top_k)

    @property
    def steps(self) -> int:
        """Draft steps that are trained."""
        return self.positions if self.family == "medusa" else self.align_steps

    def rate(self, step: int, steps: int) -> float:
        """Learning rate: linear warm-up, then down to a tenth (cosine) or to zero (linear)."""
        warm = max(1, round(self.warm_up * steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        part = (step - warm) / max(1, steps - warm)
        falling = 1 - part if self.schedule == "linear" else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part))
        return self.learning_rate * falling

    def adversary_weight(self, step: int, steps: int) -> float:
        """lambda at a step: the discriminator learns from the first one, the head listens to it little by little."""
        return self.adversary * min(1.0, step / max(1.0, self.adversary_ramp * steps))


_MEDUSA = Recipe("medusa", family="medusa", feature_weight=0.0, step_decay=0.8, noise=0.0, learning_rate=3e-3)
METHODS = {
    "eagle": Recipe("eagle"),
    "hass": Recipe("hass", align_steps=3, feature_weight=1.0, top_weight=1.0),
    "koala-eagle": Recipe("koala-eagle", layers=2, adversary=0.1),
    "hass-koala": Recipe("hass-koala", layers=2, align_steps=3, feature_weight=1.0, top_weight=1.0),
    "medusa": _MEDUSA,
    "koala-medusa": replace(_MEDUSA, method="koala-medusa", layers=2, adversary=0.01),
}

AT_LEAST_ONE = ("layers", "align_steps", "positions", "top_k", "batch_tokens", "accumulate", "epochs", "tokens", "draft_vocab")
ABOVE_ZERO = ("learning_rate", "adversary_rate", "step_decay")
NOT_NEGATIVE = (
    *("feature_weight", "soft_weight", "top_weight", "adversary", "adversary_ramp"),
    *("noise", "warm_up", "weight_decay", "clip_norm", "clip_value"),
)


def recipe_for(method: str, **changes: Any) -> Recipe:
    """A method's recipe with the given fields changed; None leaves a default.

    Raises:
        UsageError: an unknown method, or a value that makes no sense.
    """
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}: possible are {', '.join(METHODS)}")
    recipe = replace(METHODS[method], **{name: value for name, value in changes.items() if value is not None})
    for names, fits, told in (
        (AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
        (ABOVE_ZERO, lambda value: value > 0, "a number above 0"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or a number above"),
    ):
        for name in names:
            value = getattr(recipe, name)
            if value is not None and not (math.isfinite(value) and fits(value)):
                raise UsageError(f"--{name.replace('_', '-')} is {told}, not {value}")
    for name, possible in (("schedule", ("cosine", "linear")), ("optimizer", ("adamw", "muon"))):
        if getattr(recipe, name) not in possible:
            raise UsageError(f"unknown {name} {getattr(recipe, name)!r}: possible are {' and '.join(possible)}")
    if recipe.family == "feature" and recipe.own_lm_head:
        raise UsageError(f"--own-lm-head is for Medusa heads: {method} uses the target's lm_head")
    if recipe.family == "medusa" and recipe.align_steps > 1:
        raise UsageError(f"--align-steps is for FeatureHeads: {method} guesses all positions at once")
    if recipe.family == "medusa" and recipe.feature_weight:
        raise UsageError(f"--feature-weight is for FeatureHeads: {method} estimates no features")
    if not (recipe.feature_weight or recipe.soft_weight or recipe.top_weight):
        raise UsageError("all loss weights are 0: nothing would be learned")
    return recipe
