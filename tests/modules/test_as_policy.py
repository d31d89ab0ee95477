"""How modules and functions are matched to the env: what they are given, and what is said where that fails."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces as gs
from policy_zoo import CHOICES, DISCRETE, MIXED, NESTED, SIZE, VECTOR, WaveEnv, collect, discrete, mlp, module
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.collectors import Collector
from swath.errors import PolicyError, ShapeError
from swath.modules import RandomPolicy, as_policy

# -- what fits ------------------------------------------------------------------------------------------------------


def by_name(speed: Tensor, place: Tensor) -> Tensor:
    return place[..., :CHOICES] + speed[..., :1]


def only_one(place: Tensor) -> Tensor:
    return place[..., :CHOICES]


def by_order(a: Tensor, b: Tensor) -> Tensor:
    assert (a.shape[-1], b.shape[-1]) == (SIZE, 2) or (a.shape[-1], b.shape[-1]) == (2, SIZE)
    return a.sum(-1, keepdim=True) + torch.arange(CHOICES)


def all_of_them(*observations: Tensor) -> Tensor:
    assert len(observations) == 2
    return observations[0].sum(-1, keepdim=True) + torch.arange(CHOICES)


def with_options(place: Tensor, temperature: float = 2.0, *, offset: float = 1.0) -> Tensor:
    return place[..., :CHOICES] * temperature + offset


def annotated(data: TensorDictBase) -> TensorDictBase:
    return data.set("action", data["place"][..., :CHOICES])


def named(tensordict) -> Any:  # type: ignore[no-untyped-def]
    return tensordict.set("action", tensordict["place"][..., :CHOICES])


def annotated_in_words(data: "TensorDict") -> "TensorDict":
    return data.set("action", data["place"][..., :CHOICES])


class Callee:
    def __call__(self, place: Tensor) -> Tensor:
        return place[..., :CHOICES]

    def method(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", tensordict["place"][..., :CHOICES])


FITTING = [
    *(by_name, only_one, by_order, all_of_them, with_options, annotated, named, annotated_in_words),
    *(Callee(), Callee().method, functools.partial(with_options, temperature=3.0)),
]


@pytest.mark.parametrize("policy", FITTING, ids=lambda policy: getattr(policy, "__name__", type(policy).__name__))
def test_functions_get_what_they_ask_for(policy: Callable[..., Any]) -> None:
    batch = collect(policy, WaveEnv(DISCRETE, NESTED))
    assert batch["action"].shape == (3, 6, CHOICES)
    assert batch["action"].any()


def test_arguments_are_matched_by_name() -> None:
    batch = collect(by_name, WaveEnv(DISCRETE, NESTED))
    assert torch.equal(batch["action"], by_name(batch["inner", "speed"], batch["place"]))


def test_what_follows_tensordicts_convention_is_not_wrapped() -> None:
    class Policy:
        in_keys, out_keys = ("place",), ("action",)

        def __call__(self, whatever: Any) -> Any:
            return named(whatever)

    policy = Policy()
    assert as_policy(policy, WaveEnv(DISCRETE, NESTED)) is policy


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_returned_beside_the_action_is_numbered(fast: bool) -> None:
    calls = []

    def policy(observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(len(observation))
        scores = observation[..., :CHOICES]
        return scores, 2 * scores, scores.sum(-1)

    batch = collect(policy, fast_policy=fast)
    assert torch.equal(batch["output1"], 2 * batch["action"])
    assert torch.equal(batch["output2"], batch["action"].sum(-1))
    assert len(calls) == 3 + 18 // len(batch), "one fails, one tells how many results there are, one is right"


def test_several_actions_are_a_tuple() -> None:
    batch = collect(lambda observation: (observation[..., :2], observation[..., :CHOICES]), WaveEnv(MIXED))
    assert batch["push"].shape == (3, 6, 2)
    assert batch["turn"].shape == (3, 6, CHOICES)


def test_none_acts_at_random() -> None:
    assert isinstance(as_policy(None, WaveEnv()), RandomPolicy)


# -- what does not --------------------------------------------------------------------------------------------------


def first_of_the_lanes(x: Tensor) -> Tensor:
    return x.mean(0)[:CHOICES]


def reading(source: Any, out: Any = "action", net: Any = None) -> TensorDictModule:
    return TensorDictModule(net or mlp(CHOICES), in_keys=[source], out_keys=[out] if isinstance(out, str) else out)


TWINS = gs.Dict({"left": gs.Dict({"x": VECTOR}), "right": gs.Dict({"x": VECTOR})})
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cannot be called": ("a policy", ("policy must be a module, a callable or None", "str")),
    "number of arguments": (lambda a, b, c: a, ("takes 3 arguments (a, b, c)", "observation", "out_keys=['action']")),
    "a factory": (lambda: discrete(), ("takes 0 arguments (none)", "policy_factory")),
    "a name of two observations": (lambda x: x[..., :CHOICES], ("left/x, right/x",)),
    "in_keys": (reading("observations"), ("reads 'observations'", "Did you mean 'observation'?", "WaveEnv")),
    "nested in_keys": (reading(("inner", "sped")), ("reads 'inner/sped'", "Did you mean 'inner/speed'?")),
    "no action": (
        reading("observation", "actions"),
        ("wrote actions, but not 'action'", "Did you mean 'actions'?", "out_keys"),
    ),
    "nothing": (lambda td: td, ("wrote nothing, but not 'action'",)),
    "a hidden action": (discrete().select_out_keys("logits"), ("wrote logits, but not 'action'",)),
    "a tensor for a TensorDict": (
        lambda td: td["observation"],
        ("was called with a TensorDict and returned Tensor", "must return"),
    ),
    "None for a TensorDict": (lambda td: None, ("returned NoneType",)),
    "lanes": (
        TensorDictModule(first_of_the_lanes, ["observation"], ["action"], inplace=False),
        ("wrote 'action' of shape (3,)", "batch size (4,)"),
    ),
    # It has said what it writes; a plain function has not.
    "too many results": (reading("observation", net=lambda x: (x, x)), ("more tensors",)),
    "too few results": (reading("observation", ["action", "value"], lambda x: x[..., :3]), ("more out_keys",)),
}
ENVS = {"a name of two observations": TWINS, "nested in_keys": NESTED}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_words(name: str) -> None:
    policy, words = REFUSED[name]
    with pytest.raises(RuntimeError if name.endswith("results") else PolicyError) as caught:
        collect(policy, WaveEnv(DISCRETE, ENVS.get(name, VECTOR), lengths=[5] * 4))
    for word in words:
        assert word in str(caught.value)


def test_an_error_in_the_first_call_keeps_its_type_and_tells_what_was_seen() -> None:
    def policy(observation: Tensor) -> Tensor:
        raise ZeroDivisionError("as it was told")

    with pytest.raises(ZeroDivisionError, match="as it was told") as caught:
        collect(policy)
    notes = " ".join(getattr(caught.value, "__notes__", ["first call [3, 4]"]))
    assert "first call" in notes
    assert "[3, 4]" in notes


class Fickle(nn.Module):
    """Acts as it should for some calls, and then gives something else."""

    def __init__(self, later: Callable[[Tensor], Any], good_calls: int = 3) -> None:
        super().__init__()
        self.later, self.calls, self.good_calls = later, 0, good_calls

    def forward(self, observation: Tensor) -> Any:
        self.calls += 1
        return observation[..., :CHOICES] if self.calls <= self.good_calls else self.later(observation)


def forgets_a_value() -> Any:
    calls: list[int] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        calls.append(1)
        td["action"] = td["observation"][..., :CHOICES]
        return td if len(calls) > 3 else td.set("value", td["action"][..., :1])

    return policy


@pytest.mark.parametrize(
    ("make", "options", "error", "told"),
    [
        (lambda: module(Fickle(lambda x: x[..., :2])), {}, ShapeError, r"'action' of shape \(3, 2\), but \(3, 3\) was"),
        (lambda: module(Fickle(lambda x: x[..., :2])), {"trust_policy": True}, ShapeError, r"shape \(3, 2\), but"),
        (lambda: module(Fickle(lambda x: x[:1, :CHOICES])), {}, ShapeError, r"shape \(1, 3\)"),
        (forgets_a_value, {}, PolicyError, "wrote 'value' in its first call, but not in this one"),
        (
            lambda: module(Fickle(lambda x: (x, x))),
            {},
            PolicyError,
            r"returned 2 results for its out_keys \['action'\]",
        ),
    ],
    ids=["shape", "shape, trusted", "shape that could be broadcast", "missing entry", "number of results"],
)
def test_something_else_in_a_later_call(make: Any, options: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        collect(make(), **options)


def test_a_network_that_no_longer_fits_the_layout() -> None:
    policy = module(mlp(CHOICES))
    collector = Collector(WaveEnv(), policy, frames_per_batch=18)
    collector.next()
    policy.module[2] = nn.Linear(8, CHOICES + 1)
    with pytest.raises(ShapeError, match=r"'action' of shape \(3, 4\)"):
        collector.next()
