"""Load of the machine while the run trains: CPU, memory and the GPUs that the run can see."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

_log = logging.getLogger(__name__)


class HardwareSampler:
    """Means of CPU and GPU counters since the last `window()`.

    A daemon thread calls `sample()` every `interval_s`; with `interval_s=0` the caller does. The
    GPU counters come from `nvml` (the pynvml module, imported when None); without the library or a
    GPU there are no gpu keys. A counter that fails is noted once and lost, the others go on.
    """

    def __init__(
        self,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.perf_counter,
        nvml: Any | None = None,
        pid: int | None = None,
        cpu_budget: int | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._clock, self._interval_s = clock, interval_s
        self._process, self._own = psutil.Process(pid), pid is None
        self._budget = cpu_budget or len(self._process.cpu_affinity())
        self._gpus = _Gpus(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
        self._sums: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()
        self.cpu_s = 0.0
        """CPU seconds that the sampling itself took."""
        self._cpu_before = self._cpu_now()
        psutil.cpu_percent()  # its first answer has nothing to compare with
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if interval_s:
            self._thread = threading.Thread(target=self._run, daemon=True, name="hardware")
            self._thread.start()

    def sample(self) -> None:
        """Read every counter once; called by one thread only."""
        begin = time.thread_time()
        values: dict[str, float] = {"cpu/machine_util_pct": psutil.cpu_percent()}
        values["cpu/rss_bytes"] = float(self._process.memory_info().rss)
        values |= self._gpus.read()
        with self._lock:
            for name, value in values.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        self.cpu_s += time.thread_time() - begin

    def window(self) -> dict[str, float]:
        """Means since the last call; the own CPU time is exact, not sampled."""
        now, before = self._cpu_now(), self._cpu_before
        with self._lock:
            means = {name: total / count for name, (total, count) in self._sums.items()}
            self._sums = {}
        wall_s = now[0] - before[0]
        if wall_s > 0:
            self._cpu_before = now
            means["cpu/util_pct"] = 100 * (now[1] - before[1]) / wall_s / self._budget
        return means

    def facts(self) -> dict[str, Any]:
        """Facts about the machine, for result.json."""
        return {
            "cpu_model": _cpu_model(),
            "cpus_visible": os.cpu_count(),
            "cpu_budget": self._budget,
            "ram_bytes": psutil.virtual_memory().total,
            "gpus": self._gpus.names,
            "driver": self._gpus.driver,
        }

    def close(self) -> None:
        """End the sampling; a second call does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._gpus.close()

    def _cpu_now(self) -> tuple[float, float]:
        if self._own:
            return self._clock(), time.process_time()
        times = self._process.cpu_times()
        return self._clock(), times.user + times.system

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.sample()
            except psutil.Error as error:  # the watched process is gone
                _log.warning("hardware metrics end here: %s", error)
                return


class _Gpus:
    """The GPUs that CUDA would use in this process, through NVML."""

    def __init__(self, nvml: Any | None, visible: str | None) -> None:
        self._nvml: Any = nvml
        self._handles: list[Any] = []
        self._failed: set[str] = set()
        self.names: list[str] = []
        self.driver: str | None = None
        if nvml is None:
            try:
                import pynvml
            except ImportError:
                return
            self._nvml = nvml = pynvml
        try:
            nvml.nvmlInit()
            every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            self._handles = _visible(every, visible, nvml)
            self.names = [_text(nvml.nvmlDeviceGetName(gpu)) for gpu in self._handles]
            self.driver = _text(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError:
            self._handles = []  # no driver or no GPU: nothing to say

    def read(self) -> dict[str, float]:
        """Means of utilization and temperature, sums of memory and power, over all GPUs."""
        nvml = self._nvml
        if not self._handles:
            return {}
        counters: dict[str, Callable[[Any], float]] = {
            "util_pct": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "mem_used_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(
                gpu, nvml.NVML_TEMPERATURE_GPU
            ),
        }
        values = {}
        for name, counter in counters.items():
            each = [self._try(name, i, counter) for i in range(len(self._handles))]
            good = [value for value in each if value is not None]
            if not good:
                continue
            total = sum(good)
            summed = name in ("mem_used_bytes", "power_w")
            values[f"gpu/{name}"] = total if summed else total / len(good)
            if len(self._handles) > 1:
                values |= {f"gpu{i}/{name}": v for i, v in enumerate(each) if v is not None}
        return values

    def close(self) -> None:
        """Release NVML."""
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _try(self, name: str, index: int, counter: Callable[[Any], float]) -> float | None:
        key = f"gpu{index}/{name}"
        if key in self._failed:
            return None
        try:
            return float(counter(self._handles[index]))
        # MIG slices have no utilization; a later NVML may lack a call altogether.
        except (self._nvml.NVMLError, AttributeError) as error:
            self._failed.add(key)
            _log.warning("%s is not available here: %s", key, error)
            return None


def _visible(every: list[Any], visible: str | None, nvml: Any) -> list[Any]:
    """The handles that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, up to a bad entry.

    Indices are NVML's (PCI order). CUDA counts alike on machines whose GPUs are all of one kind, or
    with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if visible is None:
        return every
    chosen = []
    for entry in (word.strip() for word in visible.split(",")):
        if entry.isdigit():
            found = every[int(entry) :][:1]
        elif entry.startswith("MIG-"):
            found = [nvml.nvmlDeviceGetHandleByUUID(entry)]
        else:
            uuids = [_text(nvml.nvmlDeviceGetUUID(gpu)) for gpu in every]
            found = [
                gpu
                for gpu, uuid in zip(every, uuids, strict=True)
                if entry and uuid.startswith(entry)
            ]
        if not found:
            break
        chosen.append(found[0])
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("model name", "Model")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
