"""Small models for the tests of `fully_shard`. `units()` of each says what is sharded before the model itself."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Units = list[Any]
VOCABULARY, LENGTH, WIDTH = 11, 6, 8


class Block(nn.Module):
    """Attention and an MLP. With ``recomputed`` the MLP inside the block is recomputed in backward."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Dropout(dropout), nn.Linear(13, WIDTH))
        self.recomputed: bool | None = None
        """``use_reentrant`` of the checkpoint, or `None` without one."""

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).transpose(1, 3)
        query, key, value = split.unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        if self.recomputed is None:
            return x + self.mlp(normed)
        return x + checkpoint(self.mlp, normed, use_reentrant=self.recomputed)


class GPT(nn.Module):
    """Three blocks, and a head tied to the token embedding. Each block is a unit.

    Args:
        recomputed: what is recomputed in backward: nothing, each MLP ("inside" a unit) or each block ("around" it).
        use_reentrant: of these checkpoints.
        dropout: in each MLP.
    """

    def __init__(self, recomputed: str = "nothing", use_reentrant: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.recomputed, self.use_reentrant = recomputed, use_reentrant
        for block in self.blocks if recomputed == "inside" else ():
            block.recomputed = use_reentrant
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position, std=0.1)

    def units(self) -> Units:
        return [*self.blocks]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            if self.recomputed == "around":
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return self.head(self.norm(x))


class Apart(GPT):
    """The embedding and the head are units of their own, with a weight each. The last two blocks make one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def units(self) -> Units:
        return [self.embedding, self.blocks[0], [self.blocks[1], self.blocks[2]], self.head]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


class ResNet(nn.Module):
    """A narrow one, with batch statistics that are not those of a fresh module."""

    def __init__(self, training: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3)
        self.stages = nn.Sequential(Residual(5), nn.MaxPool2d(2), Residual(5))
        self.head = nn.Linear(5, 3)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
        self.train(training)

    def units(self) -> Units:
        return [self.stages[0], self.stages[2]]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Strange(nn.Module):
    """A unit of parameters that are no plain matrices: 0-dim, empty, transposed, frozen, of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.every_other = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.fixed = nn.Parameter(torch.randn(6), requires_grad=False)
        self.coarse = nn.Parameter(torch.randn(6), requires_grad=False)
        self.numbers = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("shift", torch.randn(6))

    def double(self) -> nn.Module:
        """One parameter stays coarse. Its values are exact in double precision."""
        made = super().double()
        self.coarse.data = self.coarse.data.bfloat16()
        return made

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, self.turned)) @ self.every_other.t() * self.scale
        return y * self.fixed + self.coarse.double() * self.numbers + self.shift + self.nothing.sum()


class Awkward(nn.Module):
    """Units that are used twice, never, or only by some samples, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.strange = Strange()
        self.choice = nn.ModuleDict({"used": nn.Linear(6, 6), "unused": nn.Linear(6, 6)})
        self.last = nn.Linear(6, 3)

    def double(self) -> nn.Module:
        made = super().double()
        self.strange.double()
        return made

    def units(self) -> Units:
        return [self.twice, self.unused, self.sometimes, self.frozen, self.strange]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.twice(x))
        y = self.frozen(torch.tanh(self.twice(y)))
        if (x[:, 0] > 1).any():
            y = torch.where(x[:, :1] > 1, torch.tanh(self.sometimes(y)), y)
        return self.last(torch.tanh(self.choice["used"](self.strange(y))))


class Scaled(nn.Sequential):
    """Two parameters that may be ignored: slots read them from the device where they are."""

    def __init__(self) -> None:
        super().__init__(Multiplied(), Multiplied())

    def units(self) -> Units:
        return [self[0]]

    def ignored(self) -> list[nn.Parameter]:
        return [each.scale for each in self]


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale.to(x.device)


def on_meta(make: Callable[[], Any] = GPT) -> Any:
    """A model without memory, in float64."""
    with torch.device("meta"):
        return make().double()
