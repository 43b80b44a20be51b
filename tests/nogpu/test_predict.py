"""Training steps of a user's functions on a machine that is described, here with kernels as in the other tests."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from nogpu import predict
from nogpu.timeline.presets import RTX_3090
from processes import environment, skip_without_tools

WIDTH = 32


def alone(devices):
    model, x = nn.Linear(WIDTH, WIDTH, device=devices[0]), torch.randn(11, WIDTH).pin_memory()

    def step():
        model(x.to(devices[0], non_blocking=True)).square().mean().backward()

    return step


def averaged(devices):
    """Each device has a copy, and sends what it found to the first."""
    models = [nn.Linear(WIDTH, WIDTH, device=device) for device in devices]
    chunks = [torch.randn(3, WIDTH).pin_memory() for _ in devices]

    def step():
        outputs = [
            model(x.to(device, non_blocking=True)) for model, x, device in zip(models, chunks, devices, strict=True)
        ]
        sum(one.to(devices[0]).square().mean() for one in outputs).backward()

    return step


PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.devices("sim")
@pytest.mark.slots(4)
class TestSteps:
    def test_a_step_is_recorded_and_scheduled(self, slots):
        one = predict.predict(alone, slots, RTX_3090)
        assert one.schedule.time > 0
        assert any(launch.in_backward for launch in one.schedule.recording.launches)
        assert one.from_host == [4 * 11 * WIDTH, 0, 0, 0]
        assert one.received == one.sent == [0] * 4
        assert one.between == [2 * PARAMETERS, 0, 0, 0], "the parameters, and their gradients"

    def test_what_devices_send_and_hold_is_each_devices_own(self, slots):
        one = predict.predict(averaged, slots, RTX_3090)
        assert one.from_host == [4 * 3 * WIDTH] * 4
        assert one.received == [3 * 4 * 3 * WIDTH] + [4 * 3 * WIDTH] * 3, "outputs, and their gradients back"
        assert one.between == [2 * PARAMETERS] * 4
        assert min(one.at_most) > 2 * PARAMETERS

    def test_the_table_has_a_row_for_each_and_compares_with_the_first(self, slots):
        found = {make.__name__: predict.predict(make, slots, RTX_3090) for make in (alone, averaged)}
        head, *rows = predict.table(found).splitlines()
        assert [row.split()[0] for row in rows] == ["alone", "averaged"]
        assert rows[0].split()[2] == "1.00"
        assert head.split("  ")[-1].strip() == "at most"

    def test_what_returns_no_step_is_refused(self, slots):
        with pytest.raises(TypeError, match="returns a step, which is called without arguments; got Tensor"):
            predict.predict(lambda devices: torch.ones(1), slots, RTX_3090)


@pytest.mark.devices("cpu")  # its process has devices of its own
class TestTheCommand:
    def run(self, folder, *arguments):
        (folder / "shop.py").write_text(
            "import torch\nfrom torch import nn\n\n\ndef large(devices):\n"
            "    with torch.device(devices[0]):\n"
            "        model = nn.Sequential(*(nn.Linear(5000, 5000) for _ in range(12)))\n"
            "        x = torch.empty(512, 5000)\n"
            "    return lambda: model(x).mean().backward()\n"
        )
        command = [sys.executable, "-m", "nogpu.predict", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
        )

    @pytest.mark.long
    def test_it_plans_a_model_of_real_size(self, tmp_path):
        """Devices that skip kernels: 1.2 GB of parameters, and nothing of it on the host."""
        skip_without_tools()
        done = self.run(tmp_path, "shop:large", "--machine", "H100")
        assert done.returncode == 0, done.stderr
        assert "A prediction for 8 x H100" in done.stdout
        assert "2.2 GiB" in done.stdout.splitlines()[-1], "the parameters, and their gradients"

    @pytest.mark.parametrize(
        ("function", "words"), [("nothere:make", "no module 'nothere'"), ("shop:small", "shop has no function 'small'")]
    )
    def test_what_is_not_there_is_told_in_a_line(self, tmp_path, function, words):
        done = self.run(tmp_path, function)
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
