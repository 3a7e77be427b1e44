"""The device and its one queue. All device work runs on one thread, one job at a time, in the order of asking: no
visitor's run changes another's times, and the matrix library keeps one pool of threads (each calling thread has its own)."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol, TypeVar

from app.log import incident
from decoding.errors import UsageError

UPDATE_SECONDS = 0.2  # between two updates of the page
STILL_SECONDS = 0.1  # longest that the device stands still while the server packs and sends an update
TELL_SECONDS = 1.0  # a visitor who waits, for the device or for a long step, hears this often
T = TypeVar("T")


class Work(Protocol):
    """What a job does. `work` is run on the device's thread and gives control back whenever there may be something to
    show: True where it should be shown at once (a state that a long silence follows)."""

    stopped: threading.Event  # set by anyone: `work` ends within a step

    def work(self) -> Iterator[bool]: ...

    def finish(self) -> None:
        """Called once: `work` has ended, or will not begin."""


class Job:
    """Work that was asked for, and the way from the device's thread to the one visitor who follows it."""

    def __init__(self, device: "Device", work: Work) -> None:
        self.device, self.work = device, work
        self.started: float | None = None  # monotonic seconds
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._asked = threading.Event()  # the visitor waits for an update
        self._wish: tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future] | None = None
        self._shown = 0.0

    def stop(self) -> None:
        """End it: within a step where it runs, at once where it still waits."""
        self.work.stopped.set()
        self.device.withdraw(self)
        self._asked.set()

    async def updates(self, make: Callable[[], T], first: T) -> AsyncIterator[T]:
        """`first`, then `make()` of the newest state whenever the taker comes back for more, at last of the ended one.
        What lies between two takings is in the later one: a slow taker misses nothing. Closing this stops the job.

        Args:
            make: called where the state stands still: on the device's thread between two steps, or while the job waits.
        """
        value = first
        try:
            yield value
            while not self.ended.is_set():
                wish = asyncio.get_running_loop().create_future()
                with self._lock:
                    self._wish = (make, wish.get_loop(), wish)
                    self._asked.set()
                if self.ended.is_set():
                    break
                await asyncio.wait([wish], timeout=TELL_SECONDS)
                if self._withdrawn(wish):  # nothing new; but a taker that has gone is noticed only when something is given
                    with self.device.standing(self) as waits:
                        value = make() if waits else value
                elif (new := await wish) is None:
                    break
                else:
                    value = new
                yield value
            yield make()
        finally:
            self.stop()

    def _withdrawn(self, wish: asyncio.Future) -> bool:
        """Take a wish back; False where it is granted already."""
        with self._lock:
            if self._wish is None or self._wish[2] is not wish:
                return False
            self._wish = None
            self._asked.clear()
            return True

    def show(self, at_once: bool) -> None:
        """On the device's thread: hand an update over if one is due, and stand still while the server works on it."""
        if at_once:
            self._asked.wait(STILL_SECONDS)
        if not self._asked.is_set() or (not at_once and time.monotonic() - self._shown < UPDATE_SECONDS):
            return
        with self._lock:
            wish, self._wish = self._wish, None
            self._asked.clear()
        if wish is None:
            return  # stopped
        make, loop, future = wish
        self._give(loop, future, make())
        self._asked.wait(STILL_SECONDS)
        self._shown = time.monotonic()

    def end(self) -> None:
        """The work is over."""
        self.work.finish()
        self.ended.set()
        with self._lock:
            wish, self._wish = self._wish, None
        if wish is not None:
            self._give(wish[1], wish[2], None)

    @staticmethod
    def _give(loop: asyncio.AbstractEventLoop, future: asyncio.Future, value: Any) -> None:
        try:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(value))
        except RuntimeError:
            pass  # the server's loop is closed: nobody is there to take it


class Device:
    """The thread that owns the device, and who waits for it."""

    def __init__(self, places: int = 32, spare: Callable[[], bool] | None = None) -> None:
        """
        Args:
            places: requests that may wait or run; further ones are refused.
            spare: called again and again on the device's thread while nobody asks for it; does a step of something that can
                wait, and tells whether there is more. After False it is asked again when the next job has ended.
        """
        self.places, self.spare = places, spare
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._seconds: deque[float] = deque(maxlen=8)  # of the newest jobs
        self.closed = False
        self._thread: threading.Thread | None = None

    @property
    def requests(self) -> int:
        """How many run or wait. (No `__len__`: a device that has nothing to do would count as false, as none at all.)"""
        return len(self._waiting) + (self._running is not None)

    def submit(self, work: Work) -> Job:
        """Queue work.

        Raises:
            UsageError: too many wait already, or the server is ending.
        """
        with self._changed:
            self.check()
            job = Job(self, work)
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return job

    def check(self) -> None:
        """Raises UsageError where no more work is taken."""
        if self.closed:
            raise UsageError("the server is shutting down: try again in a minute")
        if self.requests >= self.places:
            raise UsageError(f"{self.requests} requests are waiting or running, no more are taken: try again in a minute")

    def ahead(self, job: Job) -> int:
        """How many others come before it, the running one included; 0 = it runs, or has ended."""
        with self._changed:
            return self._waiting.index(job) + (self._running is not None) if job in self._waiting else 0

    @property
    def doing(self) -> str | None:
        """What runs, in words, where it is no visitor's request."""
        running = self._running
        return getattr(running.work, "doing", None) if running else None

    def wait_seconds(self, job: Job) -> float | None:
        """About how long until it begins, from how long the newest jobs took; None where none has ended yet."""
        with self._changed:
            if not self._seconds or job not in self._waiting:
                return None
            usual = sum(self._seconds) / len(self._seconds)
            running = self._running
            left = 0.0 if running is None or running.started is None else max(0.0, usual - (time.monotonic() - running.started))
            return left + usual * self._waiting.index(job)

    def standing(self, job: Job) -> "_Standing":
        """A context in which a waiting job does not begin; its value is whether the job waits."""
        return _Standing(self, job)

    def withdraw(self, job: Job) -> None:
        """Take a job that waits out of the queue."""
        with self._changed:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        job.end()

    def close(self, seconds: float = 10.0) -> None:
        """Stop everything: what waits is withdrawn, what runs ends within a step and keeps what it made."""
        with self._changed:
            self.closed = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._changed.notify_all()
        for job in jobs:
            job.stop()
        if self._thread is not None:
            self._thread.join(seconds)

    def _serve(self) -> None:
        more = False  # for spare time
        while True:
            with self._changed:
                while not (self._waiting or self.closed or more):
                    self._changed.wait()
                if self.closed and not self._waiting:
                    return
                job = self._running = self._waiting.popleft() if self._waiting else None
                if job is not None:
                    job.started = time.monotonic()
            if job is None:
                more = self._use_spare_time()
                continue
            more = self.spare is not None
            try:
                for at_once in job.work.work():
                    job.show(at_once)
            except Exception as error:  # work tells its own failures; the device serves the next visitor whatever happens
                incident(error)
            finally:
                with self._changed:
                    self._seconds.append(time.monotonic() - job.started)
                    self._running = None
                job.end()

    def _use_spare_time(self) -> bool:
        """A step of what can wait; what fails there is not tried again."""
        assert self.spare is not None
        try:
            return self.spare()
        except Exception as error:
            incident(error)
            self.spare = None
            return False


class _Standing:
    def __init__(self, device: Device, job: Job) -> None:
        self._device, self._job = device, job

    def __enter__(self) -> bool:
        self._device._changed.acquire()
        return self._job in self._device._waiting

    def __exit__(self, *_: object) -> None:
        self._device._changed.release()
