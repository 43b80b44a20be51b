"""ResNet-50, with the module tree of torchvision's, of any width. v1.5: the 3x3 convolution has the stride."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, each normalised, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Images of ``(n, inputs, h, w)`` in."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + shortcut)


class ResNet50(nn.Sequential):
    """Images `(n, 3, h, w)` in, logits out. The original is 64 wide and has 1000 classes."""

    def __init__(self, width: int = 4, classes: int = 10) -> None:
        stem = [
            ("conv1", nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)),
            ("bn1", nn.BatchNorm2d(width)),
            ("relu", nn.ReLU(inplace=True)),
            ("maxpool", nn.MaxPool2d(3, stride=2, padding=1)),
        ]
        layers: list[tuple[str, nn.Module]] = []
        inputs = width
        for number, blocks in enumerate((3, 4, 6, 3)):
            outputs = width * 2**number
            layer = nn.Sequential()
            for block in range(blocks):
                layer.append(Bottleneck(inputs, outputs, stride=2 if block == 0 and number > 0 else 1))
                inputs = 4 * outputs
            layers.append((f"layer{number + 1}", layer))
        head = [("avgpool", nn.AdaptiveAvgPool2d(1)), ("fc", nn.Linear(inputs, classes))]
        super().__init__(OrderedDict([*stem, *layers, *head]))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        *features, classify = self
        for layer in features:
            x = layer(x)
        return classify(x.flatten(1))
