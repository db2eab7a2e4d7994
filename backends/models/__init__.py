"""Models on this machine: found by name, path or Hub id; their shape, tokenizer and weights.

Importing this loads neither torch nor numpy nor a tokenizer; reading a model does.
"""

from backends.models.config import ModelConfig, load_config
from backends.models.errors import ModelError
from backends.models.files import ModelFiles, fingerprint
from backends.models.pull import Progress, is_cached
from backends.models.registry import MODELS, PackagedModel
from backends.models.resolve import resolve
from backends.models.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "MODELS",
    "ModelConfig",
    "ModelError",
    "ModelFiles",
    "PackagedModel",
    "Progress",
    "Tokenizer",
    "fingerprint",
    "is_cached",
    "load_config",
    "load_tokenizer",
    "resolve",
]
