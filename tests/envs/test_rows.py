"""Rows, wherever they lie."""

import numpy as np
import pytest
import torch
from torch import nn

from swath.envs import Leaf, Rows
from swath.envs.rows import LARGE, as_items
from swath.errors import ShapeError
from swath.runtime.columns import Columns

LEAVES = {"vector": Leaf((4,), torch.float32), "number": Leaf((), torch.int64)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("batch_size", "lanes"), [((), 1), ((3,), 3), ((2, 3), 6)])
def test_flat_has_one_dimension_of_lanes(device: str, batch_size: tuple[int, ...], lanes: int) -> None:
    rows = Rows(LEAVES, batch_size, torch.device(device))
    assert rows.flat("vector").shape == (lanes, 4)
    assert rows.flat("number").shape == (lanes,)
    assert ("vector" in rows.arrays) == (device == "cpu")


def test_flat_and_array_share_the_memory() -> None:
    rows = Rows(LEAVES, (2, 3))
    rows.arrays["vector"][4] = 7
    assert rows.flat("vector")[4].tolist() == [7] * 4
    assert rows.tensors["vector"][1, 1].tolist() == [7] * 4


def test_rows_over_columns_and_their_parts_share_the_memory() -> None:
    columns = Columns.shared(LEAVES, (4, 3))
    rows, part = Rows.over(columns), Rows.over(columns.part(1, 3))
    rows.arrays["vector"][3:9] = torch.arange(24).view(6, 4).numpy()
    assert part.lanes == 6
    assert part.arrays["vector"].tolist() == torch.arange(24).view(6, 4).tolist()
    rows.part(6, 9, (3,)).tensors["number"].fill_(5)
    assert part.tensors["number"].tolist() == [[0] * 3, [5] * 3]


@pytest.mark.parametrize("size", [4, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.uint16], ids=str)
def test_what_is_put_is_copied_whatever_it_is(size: int, dtype: torch.dtype) -> None:
    rows = Rows({"x": Leaf((size,), dtype)}, (2,))
    value = torch.arange(2 * size).view(2, size).to(dtype)
    for put in (value, value.clone().t().contiguous().t(), nn.Parameter(value, dtype.is_floating_point)):
        rows.tensors["x"].zero_()
        rows.put("x", put, "It")
        assert torch.equal(rows.tensors["x"], value)
        assert not rows.tensors["x"].requires_grad
    if dtype is torch.float32:
        rows.put("x", torch.view_as_complex(torch.stack([value, -value], -1)).conj().imag, "It")
        assert torch.equal(rows.tensors["x"], value)
    with pytest.raises(ShapeError, match=r"It gave 'x' of shape"):
        rows.put("x", value[:1], "It")


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.complex128], ids=str)
def test_items_are_what_each_place_has_in_the_same_memory(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    columns = Columns({"x": Leaf(shape, dtype)}, (4, 5)).tensors["x"].numpy()
    row = np.arange(np.prod((4, *shape), dtype=int)).reshape(4, *shape).astype(columns.dtype)
    as_items(columns, 2)[:, 3] = as_items(row, 1)
    assert (columns[:, 3] == row).all()
    assert not columns[:, [0, 1, 2, 4]].any()
    assert np.shares_memory(as_items(columns, 2), columns) == bool(columns.size)


@pytest.mark.parametrize("batch_size", [(), (6,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_rows_of_some_lanes_are_set_from_whatever_has_all(batch_size: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = Rows(LEAVES, batch_size)
    value = torch.arange(4 * rows.lanes, dtype=dtype).view(*batch_size, 4)
    lanes = np.array([0, 2, 5])[: rows.lanes]
    wanted = torch.zeros(rows.lanes, 4)
    wanted[lanes] = value.float().view(rows.lanes, 4)[lanes]
    for given in (
        value,
        value.mT.contiguous().mT if batch_size else value,
        nn.Parameter(value, dtype.is_floating_point),
    ):
        rows.tensors["vector"].zero_()
        rows.set_some("vector", lanes, given)
        assert torch.equal(rows.flat("vector"), wanted)
