"""Small models, one for each feature of modules that replicas must reproduce (ties, hooks, closures, ...).

These are not benchmarks: their shapes are as small as the tested feature allows. Any test of code
that copies modules may use them. On several slots `CASES` give the results of one device.
`DROPOUT_CASES` draw random numbers: they give the results of `Case.twin`, the same model without
checkpointing.
"""

import functools
import types
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel.testing.cases import Batch, Case, generator, numbers, seeded, sgd, tokens


def _mlp(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 3)))


def _convnet(training: bool) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    net.get_buffer("1.running_mean").normal_()
    net.get_buffer("1.running_var").uniform_(0.5, 2.0)
    return net.train(training)


class _Outputs(nn.Module):
    """A recurrent layer without its final state, because dimension 0 of that state is not the batch."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _sequences_with_states(size: int, seed: int) -> Batch:
    x, hidden, cell = (
        torch.randn(length, size, width, dtype=torch.float64, generator=generator(seed + length))
        for length, width in ((5, 3), (2, 4), (2, 4))
    )
    return (x, (hidden, cell)), {}


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0, batch_first=True)


def _padded(size: int, seed: int) -> Batch:
    (x,), _ = numbers(5, 8)(size, seed)
    lengths = 3 + torch.arange(size) % 3
    return (x,), {"src_key_padding_mask": torch.arange(5) >= lengths[:, None]}


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = split.unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class _GPT(nn.Module):
    """Token and position embeddings, two blocks, and a head tied to the token embedding."""

    def __init__(self, vocabulary: int = 11, length: int = 6, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.Sequential(_Block(width, 2), _Block(width, 2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))


class _ParameterContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(0.5 * torch.randn(6, 6) for _ in range(3))
        self.vectors = nn.ParameterDict({"scale": torch.randn(6), "shift": torch.randn(6)})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        assert len(self.matrices) == 3
        assert sorted(self.vectors) == ["scale", "shift"]
        return x * self.vectors["scale"] + self.vectors["shift"]


class _AroundForward(nn.Module):
    """A Python module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)))


class _Checkpointed(nn.Module):
    """A block that is recomputed in backward, by either kind of checkpointing or not at all."""

    def __init__(self, use_reentrant: bool | None, dropout: float) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.use_reentrant is None:
            return self.head(self.block(x))
        return self.head(checkpoint(self.block, x, use_reentrant=self.use_reentrant))


def _scaled(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * F.linear(x, self.weight, self.bias)


class _Gate(nn.Module):
    """A child that reads its parent. It keeps the parent in a list, so that it is no submodule."""

    def __init__(self, parent: "_Bound") -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.above = [parent]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x)) * self.above[0].scale


class _Bound(nn.Module):
    """Bound methods as attributes: the module's own forward, a child's, and a child's method that the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.gate = _Gate(self)
        self.tail = nn.Linear(6, 3)
        self.tail.forward = types.MethodType(_scaled, self.tail)  # type: ignore[method-assign]
        self.enter = self.gate.forward
        self.forward = types.MethodType(_Bound.run, self)

    def run(self, x: Tensor) -> Tensor:
        return self.tail(x + self.enter(x))


class _PlainReferences(nn.Module):
    """Submodules reached through plain attributes: a list, a dict, and a module directly in ``__dict__``."""

    again: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.route = [self.second, self.first]
        self.named = {"last": self.third}
        vars(self)["again"] = self.first

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.route:
            x = torch.tanh(layer(x))
        return self.named["last"](self.again(x))


class _Closures(nn.Module):
    """Weights and modules that callables reach: a partial, a hook's closure, a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.gain = gain = nn.Parameter(torch.randn(3))
        multiply = functools.partial(F.linear, weight=self.first.weight)
        self.first.forward = multiply  # type: ignore[method-assign]
        self.second.register_forward_hook(lambda module, args, output: output * gain)
        self.last = weakref.ref(self.second)

    def forward(self, x: Tensor) -> Tensor:
        last = self.last()
        assert last is not None
        return last(torch.tanh(self.first(x)))


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class _SometimesUsed(nn.Module):
    """A branch for samples whose first number is positive: all slots use it, some, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = self.always(x), x[:, 0] > 0
        if not chosen.any():
            return out
        return out.index_add(0, chosen.nonzero()[:, 0], self.sometimes(x[chosen]))


class _Complex(nn.Module):
    """Complex parameters on real input, complex output."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.mix.dtype) @ self.mix) * torch.exp(1j * self.phase)


def _scripted() -> nn.Module:
    return torch.jit.script(_mlp())


def _traced() -> nn.Module:
    return torch.jit.trace(_mlp(), torch.zeros(2, 6))


def _embedding() -> nn.Module:
    # Samples repeat tokens, and slots share them, so sparse gradients have to be summed.
    return nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Tanh(), nn.Linear(4, 3))


_x = numbers(6)
_sequence = numbers(5, 3)
_image = numbers(2, 4, 4)
_lstm = functools.partial(nn.LSTM, 3, 4, bidirectional=True)
_reentrant = functools.partial(_Checkpointed, True)
_not_reentrant = functools.partial(_Checkpointed, False)
_not_checkpointed = seeded(_Checkpointed, None, 0.5)

CASES: tuple[Case, ...] = (
    Case("mlp", seeded(_mlp), _x),
    Case("convnet_eval", seeded(_convnet, training=False), _image),
    Case("convnet_train", seeded(_convnet, training=True), _image, by_chunks=True),
    Case("lstm", seeded(lambda: _Outputs(_lstm(num_layers=2, batch_first=True))), _sequence),
    Case("lstm_dim1", seeded(_lstm), _sequences_with_states, dim=1),
    Case("gru", seeded(lambda: _Outputs(nn.GRU(3, 4, batch_first=True))), _sequence),
    Case("encoder_layer", seeded(_encoder_layer), _padded),
    Case("gpt", seeded(_GPT), tokens(6, 11)),
    Case("sparse_embedding", seeded(_embedding), tokens(4, 7), optimizer=sgd),
    Case("weight_norm_hook", seeded(_mlp, nn.utils.weight_norm), _x),
    Case("weight_norm", seeded(_mlp, nn.utils.parametrizations.weight_norm), _x),
    # In training both spectral norms run a power iteration on buffers. Replicas start from the
    # vectors that one device starts from, and slot 0 leaves its own behind: steps remain equal.
    Case("spectral_norm_hook", seeded(_mlp, nn.utils.spectral_norm), _x),
    Case("spectral_norm", seeded(_mlp, nn.utils.parametrizations.spectral_norm), _x),
    Case("parameter_containers", seeded(_ParameterContainers), _x),
    Case("scripted", seeded(_scripted), _x),
    Case("traced", seeded(_traced), _x),
    Case("scripted_child", seeded(lambda: _AroundForward(_scripted())), _x),
    Case("checkpoint_reentrant", seeded(_reentrant, 0.0), _x),
    Case("checkpoint", seeded(_not_reentrant, 0.0), _x),
    Case("bound_methods", seeded(_Bound), _x),
    Case("plain_references", seeded(_PlainReferences), _x),
    Case("closures", seeded(_Closures), _x),
    Case("unused", seeded(_Unused), _x),
    Case("sometimes_used", seeded(_SometimesUsed), _x),
    Case("complex", seeded(_Complex), _x),
)

DROPOUT_CASES: tuple[Case, ...] = (
    Case("dropout_reentrant", seeded(_reentrant, 0.5), _x, twin=_not_checkpointed),
    Case("dropout_checkpoint", seeded(_not_reentrant, 0.5), _x, twin=_not_checkpointed),
)
