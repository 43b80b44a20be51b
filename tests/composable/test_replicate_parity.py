"""Training a replicated module equals training on one device, for every model of the zoo, in float64."""

import pytest
import torch
from loops import in_place

from dataparallel.testing import parity
from dataparallel.testing.cases import Case
from dataparallel.testing.models import CASES, DROPOUT_CASES
from dataparallel.testing.steps import assert_steps_match, run_step

SCRIPTED = ("scripted", "traced")
REPLICATED = [case for case in CASES if case.name not in SCRIPTED]
every_case = pytest.mark.parametrize("case", REPLICATED, ids=lambda case: case.name)


@pytest.mark.usefixtures("one_intra_op_thread")
class TestParity:
    @pytest.mark.slots(2, long=[3, 8])
    @every_case
    def test_one_step_equals_one_device(self, case: Case, slots):
        size = 2 * len(slots) + 1
        for samples in (size, 1):
            batch = case.batch(samples, size)
            parity.assert_same_step(case.build, batch, slots, dim=case.dim, by_chunks=case.by_chunks, wrap=in_place)

    @every_case
    def test_twenty_optimizer_steps_equal_one_device(self, case: Case, slots):
        parity.assert_same_training(
            case.build,
            [case.batch(3 + step % 5, step) for step in range(20)],
            slots,
            dim=case.dim,
            optimizer=case.optimizer,
            by_chunks=case.by_chunks,
            wrap=in_place,
        )

    @every_case
    def test_each_replica_computes_with_its_own_weights(self, case: Case, slots):
        noise = parity.Perturbation(seed=1, scale=0.1)
        parity.assert_same_step(case.build, case.batch(7, 7), slots, dim=case.dim, perturbation=noise, wrap=in_place)

    @pytest.mark.parametrize("case", [c for c in CASES if c.name in SCRIPTED], ids=lambda case: case.name)
    def test_scripted_models_are_refused(self, case: Case, slots):
        with pytest.raises(TypeError, match="ScriptModule"):
            in_place(case.build(), slots)

    @pytest.mark.parametrize("case", DROPOUT_CASES, ids=lambda case: case.name)
    def test_checkpointing_recomputes_with_the_same_dropout(self, case: Case, slots):
        both = []
        for build in (case.build, case.twin):
            source = in_place(build().to(slots[0]), slots, case.dim)
            torch.manual_seed(0)
            both.append(run_step(source, case.batch(7, 7)))
        assert_steps_match(*both)
