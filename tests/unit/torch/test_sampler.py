"""ElasticSampler: what it deals to whom, before and after a reset."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from elastic_driver.torch import sampler as module  # noqa: E402
from elastic_driver.torch.sampler import ElasticSampler  # noqa: E402

pytestmark = pytest.mark.unit


class Job:
    """Samplers of all ranks, as each would be in its own process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, size: int, **options: object) -> None:
        self.patch = monkeypatch
        self.samplers = [self.on(rank, size, lambda: ElasticSampler(range(count), **options)) for rank in range(size)]

    def on(self, rank, size, what):
        self.patch.setattr(module, "is_initialized", lambda: True)
        self.patch.setattr(module, "rank", lambda: rank)
        self.patch.setattr(module, "size", lambda: size)
        return what()

    def resize(self, count: int, size: int, **options: object) -> None:
        state = self.samplers[0].state_dict()
        self.samplers = [self.on(rank, size, lambda: ElasticSampler(range(count), **options)) for rank in range(size)]
        for rank, sampler in enumerate(self.samplers):
            self.on(rank, size, lambda sampler=sampler: sampler.load_state_dict(state))

    def step(self, batch_idx: int, batch: int) -> list[int]:
        used = []
        for sampler in self.samplers:
            used += sampler.get_indices(batch_idx, batch)
            sampler.record_batch(batch_idx, batch)
        return used


@given(st.data())
def test_each_sample_once_but_for_the_padding(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        count = data.draw(st.integers(0, 60))
        job = Job(patch, count, data.draw(st.integers(1, 5)), seed=4)
        batch = data.draw(st.integers(1, 4))
        used: list[int] = []
        for _ in range(data.draw(st.integers(0, 3))):
            for index in range(data.draw(st.integers(0, 3))):
                # A batch that is cut short would be counted in full; the end of the epoch is below.
                if job.samplers[0].processed_num + batch * len(job.samplers) > count:
                    break
                used += job.step(index, batch)
            job.resize(count, data.draw(st.integers(1, 5)), seed=4)
        padding = job.samplers[0].padding
        rest = [list(sampler) for sampler in job.samplers]
        assert len({len(part) for part in rest}) == 1
        assert len(rest[0]) == len(job.samplers[0])
        assert sum(sampler.rank_padding for sampler in job.samplers) == padding
        assert padding < len(job.samplers)
        once = [part[: len(part) - sampler.rank_padding] for part, sampler in zip(rest, job.samplers, strict=True)]
        for part in once:
            used += part
        assert sorted(used) == list(range(count))


def test_order_depends_on_seed_and_epoch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Job(monkeypatch, 50, 1, seed=1).samplers[0], Job(monkeypatch, 50, 1, seed=1).samplers[0]
    assert list(first) == list(second)
    assert list(first) != list(range(50))
    before = list(first)
    first.set_epoch(1)
    assert list(first) != before
    assert sorted(first) == list(range(50))
    assert list(Job(monkeypatch, 50, 1, seed=2).samplers[0]) != before
    assert list(Job(monkeypatch, 5, 1, shuffle=False).samplers[0]) == [0, 1, 2, 3, 4]


def test_fetching_ahead_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 16, 2, shuffle=False)
    sampler = job.samplers[0]
    assert list(sampler) == [0, 2, 4, 6, 8, 10, 12, 14]
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 4
    sampler.record_indices([4, 6])
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 8}
    job.resize(16, 4, shuffle=False)
    assert [list(each) for each in job.samplers] == [[8, 12], [9, 13], [10, 14], [11, 15]]


def test_set_epoch_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Job(monkeypatch, 10, 1).samplers[0]
    sampler.record_batch(0, 4)
    sampler.reset()
    assert len(sampler) == 6
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_num, len(sampler)) == (1, 0, 10)


def test_count_never_passes_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Job(monkeypatch, 10, 1).samplers[0]
    for index in range(3):
        sampler.record_batch(index, 4)
    assert sampler.processed_num == 10
    sampler.reset()
    assert list(sampler) == []
    assert sampler.padding == 0
