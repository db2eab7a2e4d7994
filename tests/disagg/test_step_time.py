"""The model of step times that promises are kept by."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.disagg.engine.step_time import StepLoad, StepTime

LOADS = [StepLoad(1, 16), StepLoad(8, 2048), StepLoad(16, 256), StepLoad(prompt=128), StepLoad(8, 128, 32)]


def machine(a: float, b: float, c: float, d: float, load: StepLoad) -> float:
    return a + b * load.batch + c * load.context + d * load.prompt


def fitted(*coefficients: float) -> StepTime:
    model = StepTime()
    model.fit([(load, machine(*coefficients, load)) for load in LOADS])
    return model


@given(st.tuples(st.floats(1e-4, 1e-1), st.floats(0, 1e-2), st.floats(0, 1e-4), st.floats(0, 1e-2)))
def test_a_linear_machine_is_learned_from_a_few_steps(coefficients: tuple[float, float, float, float]) -> None:
    model = fitted(*coefficients)
    for load in (*LOADS, StepLoad(4, 1000), StepLoad(32, 9000, 64)):
        assert model.predict(load) == pytest.approx(machine(*coefficients, load), rel=0.05)


def test_it_follows_a_machine_that_became_slower_and_one_that_became_faster_again() -> None:
    model = fitted(0.010, 0.001, 1e-6, 5e-4)
    rng = random.Random(0)
    for slowdown in (2.0, 0.5):
        for _ in range(200):
            load = StepLoad(batch := rng.randint(1, 32), batch * rng.randint(50, 500), rng.choice([0, 0, 64]))
            model.observe(load, slowdown * machine(0.010, 0.001, 1e-6, 5e-4, load))
        load = StepLoad(16, 4000, 32)
        assert model.predict(load) == pytest.approx(slowdown * machine(0.010, 0.001, 1e-6, 5e-4, load), rel=0.1)


def test_the_same_load_for_hours_does_not_unlearn_the_others() -> None:
    model = fitted(0.010, 0.001, 1e-6, 5e-4)
    rng = random.Random(0)
    for _ in range(50_000):
        model.observe(StepLoad(8, 2000), machine(0.010, 0.001, 1e-6, 5e-4, StepLoad(8, 2000)) * rng.uniform(0.9, 1.1))
    load = StepLoad(30, 9000, 64)
    assert model.predict(load) == pytest.approx(machine(0.010, 0.001, 1e-6, 5e-4, load), rel=0.15)


def test_one_step_that_the_machine_interrupted_for_a_second_changes_little() -> None:
    model = fitted(0.010, 0.001, 1e-6, 5e-4)
    before = model.predict(StepLoad(8, 2000))
    model.observe(StepLoad(8, 2000), 1.0)
    assert model.predict(StepLoad(8, 2000)) < 1.5 * before


def test_the_margin_grows_on_an_unsteady_machine_until_few_steps_exceed_it() -> None:
    model, rng = fitted(0.010, 0.001, 1e-6, 5e-4), random.Random(0)
    load = StepLoad(8, 2000)
    exceeded = []
    for _ in range(4000):
        seconds = 0.020 * rng.lognormvariate(0, 0.2)
        exceeded.append(seconds > model.at_worst(load))
        model.observe(load, seconds)
    assert 0.01 < sum(exceeded[1000:]) / 3000 < 0.06


def test_prompt_tokens_that_fit_are_those_whose_step_is_predicted_to_end_in_time() -> None:
    model = fitted(0.010, 0.001, 1e-6, 5e-4)
    tokens = model.prompt_tokens_within(0.040, StepLoad(8, 2000))
    assert model.at_worst(StepLoad(8, 2000, tokens)) <= 0.040 < model.at_worst(StepLoad(8, 2000, tokens + 2))
    assert model.prompt_tokens_within(0.010, StepLoad(8, 2000)) == 0
