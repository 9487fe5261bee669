"""mcore's Mamba-2 mixer in plain torch: the scan and the norm that are Triton kernels of mamba-ssm."""

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class TorchMambaMixer(MambaMixer):
    """In place of mcore's `MambaMixer` (arXiv 2405.21060), without mamba-ssm and causal-conv1d; for training.

    Parameters, their initial values, sharding and context parallelism are mcore's. The scan is in fp32. Arguments are
    mcore's.

    Raises:
        ValueError: when called, if sequences are packed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        *,
        pg_collection: ProcessGroupCollection,
        **options: Any,
    ) -> None:
        with mock.patch.multiple(mamba_mixer, HAVE_MAMBA_SSM=True, ExtendedRMSNorm=GroupedRMSNorm):
            super().__init__(config, submodules, d_model, pg_collection=pg_collection, **options)
        self.use_mem_eff_path = True  # both of mcore's paths are the same function; the one below is neither

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """The projected input [s, b, ...] to [s, b, d_inner / tp]: convolution, scan, gate and norm."""
        if packed_seq_params is not None:
            raise ValueError("packed_seq_params do not go with Mamba layers in plain torch: pass None")
        cp, length = self.cp, len(zxBCdt)
        inner, state = cp.d_inner_local_tpcp, cp.ngroups_local_tpcp * self.d_state
        z, xBC, dt = zxBCdt.transpose(0, 1).split([inner, inner + 2 * state, cp.nheads_local_tpcp], dim=-1)
        xBC = self.act(cp.conv1d(xBC.transpose(1, 2))[..., :length]).transpose(1, 2)
        x, *keys = xBC.split([inner, state, state], dim=-1)
        x = x.unflatten(-1, (-1, self.headdim)).float()
        write, read = (key.unflatten(-1, (-1, self.d_state)).float() for key in keys)
        dt = F.softplus(dt.float() + cp.get_dt_bias().float())
        y = scan(x * dt.unsqueeze(-1), dt * -cp.get_A_log().float().exp(), write, read, self.chunk_size)
        skip = cp.get_D().float()
        y = y + x * (skip.view(-1, self.headdim) if self.D_has_hdim else skip.unsqueeze(-1))
        y = (y.flatten(2) * F.silu(z.float())).to(zxBCdt.dtype)
        y = cp.post_conv_ssm(y.transpose(0, 1).contiguous())
        return self.norm(y) if self.rmsnorm else y


class GroupedRMSNorm(torch.nn.Module):
    """RMSNorm of each `group_size` features by themselves; the weight is sharded over the tensor parallel ranks."""

    tp_group: Any

    def __init__(
        self, size: int, *, eps: float, group_size: int, device: Any, dtype: torch.dtype, norm_before_gate: bool
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape."""
        normed = F.rms_norm(x.float().unflatten(-1, (-1, self.group_size)), (self.group_size,), eps=self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """What mcore's checkpoints ask of a module."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def scan(x: Tensor, log_decay: Tensor, write: Tensor, read: Tensor, chunk_size: int) -> Tensor:
    """The state space scan of Mamba-2 by chunks (arXiv 2405.21060, section 6).

    state[t] = exp(log_decay[t]) * state[t - 1] + write[t] x[t] and y[t] = read[t] state[t], for each head.

    Args:
        x: [b, s, heads, p].
        log_decay: [b, s, heads], not positive.
        write: [b, s, groups, n], groups a divisor of heads; the paper's B. So is `read`, its C.
        chunk_size: tokens within which all pairs are computed at once.
    Returns:
        y, [b, s, heads, p].
    """
    length, heads = x.shape[1:3]
    chunk_size = min(chunk_size, length)
    write, read = (t.repeat_interleave(heads // t.size(2), dim=2) for t in (write, read))
    padding = -length % chunk_size
    x, write, read = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, write, read))
    log_decay = F.pad(log_decay, (0, 0, 0, padding))
    # [b, heads, chunks, chunk_size, ...]
    x, write, read = (t.transpose(1, 2).unflatten(2, (-1, chunk_size)) for t in (x, write, read))
    total = log_decay.transpose(1, 2).unflatten(2, (-1, chunk_size)).cumsum(-1)
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)
    pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, -torch.inf)
    y = (read @ write.transpose(-1, -2) * pairs.exp()) @ x
    to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
    added = (write * to_end).transpose(-1, -2) @ x  # [b, heads, chunks, n, p]
    state, before = torch.zeros_like(added[:, :, 0]), list[Tensor]()
    for chunk in range(added.size(2)):
        before.append(state)
        state = state * total[:, :, chunk, -1, None, None].exp() + added[:, :, chunk]
    y = y + (read * total.exp().unsqueeze(-1)) @ torch.stack(before, dim=2)
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2)
