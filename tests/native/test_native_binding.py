"""What crosses from Python into C++: borrowed tensors, refusals and levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from glm5sdk.core.errors import ContractError


def test_numpy_arrays_pass_through_capsules(native):
    x = np.arange(5, dtype=np.float32)
    z = np.empty_like(x)
    native.add(0, x, x, z)
    assert z.tolist() == [0, 2, 4, 6, 8]


def test_a_producer_without_max_version_passes(native):
    class Old:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self):
            return self.array.__dlpack__()

    x = np.ones(7, dtype=np.float32)
    z = torch.zeros(7)
    native.add(0, Old(x), torch.ones(7), z)
    assert z.tolist() == [2.0] * 7


def test_an_optional_capsule_lives_until_the_call_ends(native):
    class Temporary:
        def __dlpack__(self, **_):
            return np.full(3, 2.0, dtype=np.float32).__dlpack__()

    y = torch.empty(1, 3)
    native.linear(0, torch.zeros(1, 4), torch.zeros(3, 4), Temporary(), y)
    assert y.tolist() == [[2.0, 2.0, 2.0]]


def test_a_read_only_output_is_refused(native):
    z = np.zeros(4, dtype=np.float32)
    z.flags.writeable = False
    x = np.ones(4, dtype=np.float32)
    with pytest.raises((ContractError, BufferError)):
        native.add(0, x, x, z)
    assert z.tolist() == [0.0] * 4


def test_subclasses_and_parameters_pass(native):
    y = torch.empty(2, 3)
    native.rms_norm(0, torch.ones(2, 3), torch.nn.Parameter(torch.ones(3)), 0.0, y)
    assert y.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("where", ["fake", "meta"])
def test_tensors_without_memory_are_refused(native, where):
    if where == "fake":
        with FakeTensorMode():
            x = torch.ones(4)
    else:
        x = torch.ones(4, device="meta")
    with pytest.raises((ContractError, BufferError, RuntimeError)):
        native.add(0, x, x, torch.empty(4))


def test_empty_tensors_are_legal(native, level):
    native.add(level, torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3))
    native.rms_norm(level, torch.empty(0, 3), torch.ones(3), 1e-5, torch.empty(0, 3))
    native.linear(level, torch.empty(0, 3), torch.ones(2, 3), None, torch.empty(0, 2))
    native.linear(level, torch.empty(2, 3), torch.empty(0, 3), None, torch.empty(2, 0))
    y = torch.full((2, 5), 7.0)
    native.linear(level, torch.empty(2, 0), torch.empty(5, 0), None, y)
    assert (y == 0).all()


def test_a_wrong_type_names_the_signature(native):
    with pytest.raises(TypeError, match=r"add\(\)[\s\S]*x: Tensor, y: Tensor, z: Tensor"):
        native.add(0, [1.0], torch.ones(1), torch.ones(1))


def test_strided_tensors_are_refused(native):
    x = torch.ones(4, 4)
    with pytest.raises(ContractError, match="contiguous"):
        native.add(0, x.t()[:, :2], x, x)


def test_unsupported_dtypes_get_a_sentence(native):
    x = torch.ones(4, dtype=torch.float64)
    with pytest.raises(ContractError, match="add: x is f64, needs f32, bf16 or f16"):
        native.add(0, x, x, x)
    with pytest.raises(ContractError, match="dtype is bf16, needs f32"):
        native.add(0, torch.ones(4), torch.ones(4).bfloat16(), torch.ones(4))


@pytest.mark.parametrize("absent", [-1, 99])
def test_a_level_this_processor_lacks_is_refused(native, absent):
    x = torch.ones(4)
    with pytest.raises(ContractError, match="level is"):
        native.add(absent, x, x, x)


def test_module_constants(native):
    assert native.api_version == 1
    assert 0 <= native.cpu_level() <= 5
