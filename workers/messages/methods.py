"""The registry of attention methods, as the service imports it."""

from deltafront.kernels.constants import BLOCK, DECODE_HEAD_DIMS, PAGE_TOKENS, PREFILL_HEAD_DIMS
from deltafront.kernels.methods import (
    PRESETS,
    MethodError,
    MethodSpec,
    is_exact,
    lasting_tokens,
    method_spec,
    reads_whole_prompts,
    resume_step,
)
from deltafront.kernels.methods import load as load_methods

__all__ = [
    "BLOCK",
    "DECODE_HEAD_DIMS",
    "PAGE_TOKENS",
    "PREFILL_HEAD_DIMS",
    "PRESETS",
    "MethodError",
    "MethodSpec",
    "is_exact",
    "lasting_tokens",
    "load_methods",
    "method_spec",
    "reads_whole_prompts",
    "resume_step",
]
