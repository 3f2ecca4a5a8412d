"""A derived block that saves to and loads from a folder or the Hugging Face hub; needs the extra ``hf``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from xentflow.block import DerivedBlock
from xentflow.configuration import block_config, block_from_config
from xentflow.errors import XentflowError

try:
    from huggingface_hub import PyTorchModelHubMixin
except ImportError as error:
    raise XentflowError("xentflow.hub: expected huggingface_hub, got none; pip install 'xentflow[hf]'") from error


class HubBlock(nn.Module, PyTorchModelHubMixin, library_name="xentflow"):
    """A block with ``save_pretrained``, ``from_pretrained`` and ``push_to_hub``; its configuration is saved with it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.block = block_from_config(config)

    @classmethod
    def of(cls, block: DerivedBlock) -> "HubBlock":
        """The same block, with the same parameters."""
        made = cls(config=block_config(block))
        made.block = block
        return made

    def forward(self, *inputs: Tensor | None, **named: Tensor | None) -> Tensor:
        """The block's step."""
        stepped: Tensor = self.block(*inputs, **named)
        return stepped
