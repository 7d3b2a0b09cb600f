"""Batches placed on the devices ahead of the step that will use them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from nnx_dp._placement import Devices, shard_batch

T = TypeVar("T")


def prefetch(
    iterable: Iterable[T],
    size: int = 2,
    *,
    mesh: Any = None,
    devices: Devices = None,
    axis_name: str = "data",
) -> Prefetch[T]:
    """Reads batches in the background and splits them over the devices, ahead of their use.

    While a step computes on the devices, a thread reads the next batches and copies them there, so
    that loading costs nothing as long as it takes less time than the step.

    Args:
      iterable: gives batches, pytrees of arrays of shape ``[B, ...]``: a `grain` or PyTorch loader
        of NumPy arrays, a generator, ``dataset.as_numpy_iterator()``.
      size: how many batches are kept on the devices at most, besides the one in use.
      mesh: the mesh to place them on; by default one with all devices.
      devices: instead of a mesh, a number of devices or the devices themselves.
      axis_name: the mesh axis to split over.

    Returns:
      An iterator of the batches, in order, placed as `shard_batch` does; what the iterable raises
      is raised in its place.  Leave it early with `close`, or use it as a context manager.

    Raises:
      ValueError: if `size` is not a positive int.

    Example::

      >>> import nnx_dp, numpy as np
      >>> batches = ({"x": np.full((8, 3), i)} for i in range(3))
      >>> [float(batch["x"][0, 0]) for batch in nnx_dp.prefetch(batches, devices=1)]
      [0.0, 1.0, 2.0]
    """
    return Prefetch(
        iterable,
        lambda batch: shard_batch(batch, mesh=mesh, devices=devices, axis_name=axis_name),
        size,
    )


class Prefetch(Generic[T]):
    """An iterator of placed batches; made by `prefetch` and `DataParallel.prefetch`."""

    def __init__(self, iterable: Iterable[T], place: Callable[[T], T], size: int):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"prefetch was given size={size!r}; write a positive int.")
        self._ahead: _Ahead[T] = _Ahead(size)
        # The thread knows nothing of this object, so that it can go while the thread runs.
        self._thread = threading.Thread(
            target=_fill, args=(iter(iterable), place, self._ahead), daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._ahead.take()

    def close(self) -> None:
        """Stops reading, lets go of the batches that were read ahead, and closes a generator."""
        self._ahead.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_ahead"):
            self._ahead.close()


class _Ahead(Generic[T]):
    """What was read and not used yet, at most so many."""

    def __init__(self, size: int):
        self._changed = threading.Condition()
        self._size = size
        self._ready: deque[Callable[[], T]] = deque()
        self._ended = False

    def wait_for_room(self) -> bool:
        """Waits until another may be read; False if no more are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._ready) < self._size)
            return not self._ended

    def add(self, result: Callable[[], T], last: bool) -> None:
        with self._changed:
            if not self._ended:
                self._ready.append(result)
                self._ended = last
            self._changed.notify_all()

    def take(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._ready)
            if not self._ready:
                raise StopIteration
            result = self._ready.popleft()
            self._changed.notify_all()
        return result()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._ready.clear()
            self._changed.notify_all()


def _fill(iterator: Iterator[T], place: Callable[[T], T], ahead: _Ahead[T]) -> None:
    try:
        while ahead.wait_for_room():
            batch = place(next(iterator))
            ahead.add(lambda batch=batch: batch, last=False)
            del batch
    except BaseException as error:
        ahead.add(_raiser(error), last=True)
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def _raiser(error: BaseException) -> Callable[[], Any]:
    def throw() -> Any:
        raise error

    return throw
