"""How many tokens a prompt has, where no tokenizer of the target is at hand."""

from policies.tokens.body import estimate_prompt_tokens
from policies.tokens.calibration import Calibration
from policies.tokens.text import Estimate

__all__ = ["Calibration", "Estimate", "estimate_prompt_tokens"]
