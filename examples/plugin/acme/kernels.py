# acme/kernels.py: imported only if the kernel is chosen
from torch import Tensor
from torch.nn.functional import silu


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
