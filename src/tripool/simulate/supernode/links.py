"""Links that carry one thing after another, and what crossed each plane when. Pure; times in femtoseconds."""

from __future__ import annotations

from tripool.simulate.timeline import FS


class Link:
    def __init__(self, bytes_per_s: float) -> None:
        self._byte_fs = FS / bytes_per_s
        self.free_fs = 0
        """When what was promised is through; a cut link is busy until it is mended."""

    def cut(self, until_fs: int) -> None:
        self.free_fs = max(self.free_fs, until_fs)

    def span_fs(self, num_bytes: int) -> int:
        return round(num_bytes * self._byte_fs)


def carry(links: tuple[Link, ...], num_bytes: int, now_fs: int, first_fs: int) -> int:
    """Over all these at once, as fast as the slowest; returns when it is there. The others go on with other things."""
    start = end = now_fs
    for link in links:
        if link.free_fs > start:
            start = link.free_fs
    for link in links:
        link.free_fs = free_fs = start + link.span_fs(num_bytes)
        if free_fs > end:
            end = free_fs
    return first_fs + end


class Slices:
    """Whole numbers summed up by slices of time: the same sums in whatever order and pieces they come."""

    def __init__(self, slice_s: float) -> None:
        self.slice_fs = max(1, round(slice_s * FS))
        self._sums: dict[str, list[int]] = {}

    def count(self, name: str, amount: int, at_fs: int) -> None:
        sums, number = self._sums.get(name), at_fs // self.slice_fs
        if sums is None:
            sums = self._sums[name] = []
        if number >= len(sums):
            sums.extend([0] * (number + 1 - len(sums)))
        sums[number] += amount

    def span(self, name: str, weight: int, begin_fs: int, end_fs: int) -> None:
        """`weight` for as long as this lasts, in femtoseconds."""
        sums, number = self._sums.get(name), begin_fs // self.slice_fs
        if sums is not None and number < len(sums) and end_fs <= (number + 1) * self.slice_fs:
            sums[number] += weight * (end_fs - begin_fs)  # as almost always
            return
        while begin_fs < end_fs:
            stop = min(end_fs, (begin_fs // self.slice_fs + 1) * self.slice_fs)
            self.count(name, weight * (stop - begin_fs), begin_fs)
            begin_fs = stop

    def sums(self, name: str) -> list[int]:
        return self._sums.get(name, [])
