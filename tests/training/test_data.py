"""Labels, groups and splits: what is tested was never trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import recordings
from hypothesis import given, settings
from hypothesis import strategies as st

from training import data


@pytest.fixture(scope="module")
def launches(sweeps: Path) -> data.Launches:
    return data.load(sweeps)


def test_arrays_follow_the_recording(launches: data.Launches, sweeps: Path) -> None:
    table = data.table_of(sweeps)
    assert len(launches) == len(table)
    assert launches.families == ("gemm", "softmax")
    assert set(launches.functions) == {f"{name}_kernel(float*, int)" for name in recordings.KERNELS}
    assert (launches.duration_ns == table["duration_ns"].to_numpy()).all()
    assert np.isfinite(launches.rows).all()


def test_the_same_launch_has_the_same_key_in_both_processes(launches: data.Launches) -> None:
    first, second = (launches.take(launches.process == process) for process in (0, 1))
    assert set(second.key) <= set(first.key)
    # Sizes that give the same grid differ in their words alone.
    assert len(np.unique(launches.geometry_key)) < len(np.unique(launches.key))


def test_words_that_change_between_repeats_of_a_case_are_not_in_the_key() -> None:
    rows = []
    for shape in range(12):
        for repeat in range(3):
            row = recordings.launch(0, 1 << 14, f"gemm.mm|{shape}|fp32|forward", 0.0, len(rows), 1)
            # A size, a random offset, a byte of the stack.
            row["words"] = [0, 0, 16000 + shape, 77 * len(rows), 0, repeat % 2]
            rows.append(row)
    found = data.launches_of(recordings.table(rows))
    assert len(np.unique(found.key)) == 12
    assert len(np.unique(found.geometry_key)) == 1
    # Under one label with many launches of a kernel, other words are other work.
    for row in rows:
        row["label"] = "model.bert|b1|fp32|forward"
    assert len(np.unique(data.launches_of(recordings.table(rows)).key)) == 36


def test_the_repeated_process_is_found_in_either_order(launches: data.Launches, tmp_path: Path) -> None:
    assert (launches.again == (launches.process == 1)).all()
    turned = recordings.table(recordings.sweep(12, 20, 2) + recordings.sweep(11, 60, 1))
    turned_launches = data.launches_of(turned)
    assert (turned_launches.again == (turned_launches.process == 0)).all()


@pytest.mark.parametrize("kind", ["shapes", "kernels", "processes"])
def test_splits_do_not_leak(launches: data.Launches, kind: str) -> None:
    tested = np.zeros(len(launches), int)
    for fold in range(1 if kind == "processes" else 5):
        train, test = data.split(launches, kind, fold)
        assert not (train & test).any()
        tested += test
        if kind == "shapes":
            assert not set(launches.shape_group[train]) & set(launches.shape_group[test])
            assert not set(launches.key[train]) & set(launches.key[test])
            assert set(launches.kernel[test]) <= set(launches.kernel[train])
        if kind == "kernels":
            assert not set(launches.group[train]) & set(launches.group[test])
            assert not set(launches.kernel[train]) & set(launches.kernel[test])
        if kind == "processes":
            assert not set(launches.process[train]) & set(launches.process[test])
            assert set(launches.key[test]) <= set(launches.key[train])
    assert tested.max() == 1
    assert tested.sum() > len(launches) / 5


@given(st.lists(st.integers(0, 30), min_size=1, max_size=300), st.integers(2, 6))
@settings(max_examples=100, deadline=None)
def test_folds_keep_groups_together_and_are_balanced(groups: list[int], count: int) -> None:
    codes = np.array(groups)
    found = data.folds(codes, count)
    assert set(found.tolist()) <= set(range(count))
    for group in set(groups):
        assert len(set(found[codes == group])) == 1
    sizes = np.bincount(found, minlength=count)
    assert sizes.max() - sizes.min() <= np.bincount(codes).max()


def test_what_cannot_be_split_is_refused(launches: data.Launches) -> None:
    with pytest.raises(ValueError, match="no split 'time'"):
        data.split(launches, "time")
    with pytest.raises(ValueError, match="nothing to split by processes"):
        data.split(launches.take(~launches.again), "processes")


def test_a_recording_without_times_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    row = recordings.launch(0, 1000, "", 0.0, 0, 1)
    pq.write_table(recordings.table([{**row, "duration_ns": None}]), tmp_path / "untimed.parquet")
    with pytest.raises(ValueError, match="no kernel with a time"):
        data.load(tmp_path / "untimed.parquet")


def test_launches_without_labels_are_grouped_by_geometry() -> None:
    rows = [recordings.launch(k, 4096 << i, "", 0.0, 0, 1) for k in range(2) for i in range(4) for _ in range(3)]
    found = data.launches_of(recordings.table(rows))
    assert len(np.unique(found.shape_group)) == 8
    assert found.families == ("unlabelled",)


@pytest.mark.parametrize(
    ("function", "group"),
    [
        ("void at::native::reduce_kernel<512, 1, at::Op<float> >(at::Op<float>)", "at::native::reduce_kernel"),
        ("sm90_xmma_gemm_bf16_128x64x32_nn", "sm#xmma_gemm_bf#x#x#nn"),
        ("void (anonymous namespace)::softmax<float, 4>(float*)", "anonymous::softmax"),
        ("add_kernel", "add_kernel"),
    ],
)
def test_groups_are_names_without_template_arguments_and_digits(function: str, group: str) -> None:
    assert data.group_of(function) == group


def test_tiles_do_not_make_groups() -> None:
    names = (
        "cutlass_80_tensorop_s16816gemm_128x256_32x3_nn_align8",
        "cutlass_80_tensorop_s16816gemm_64x64_64x6_nn_align8",
    )
    assert data.group_of(names[0]) == data.group_of(names[1])


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_name_has_a_group(name: str) -> None:
    assert isinstance(data.group_of(data.demangle(name.replace("\0", ""))), str)


@pytest.mark.parametrize(
    ("function", "family"),
    [
        ("nvjet_sm90_hsh_128x8_64x12_2x1_v_bz_TNT", "nvjet_sm"),
        ("nvjet_sm90_tst_64x16_64x13_4x1_v_bz_TNN", "nvjet_sm"),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64", "sm_xmma"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(int)", "at::native::reduce_kernel"),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<double> >(int)", "at::native::reduce_kernel"),
        ("saxpy", "saxpy"),
        ("_", "_"),
    ],
)
def test_variants_of_one_source_are_one_name_family(function: str, family: str) -> None:
    assert data.name_family_of(function) == family
