"""Hardware counters, with a stand-in for NVML, and provenance."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import until

from rl_pipeline.telemetry import hardware
from rl_pipeline.telemetry.hardware import HardwareSampler
from rl_pipeline.telemetry.provenance import changed_code, provenance


class Nvml:
    """As much of pynvml as is used; `script[counter][gpu]` holds the values to come."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, count=1, **script):
        self.count, self.script = count, script

    def nvmlInit(self):
        if not self.count:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self):
        self.count = 0

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return int(uuid.split("-")[1])

    def nvmlDeviceGetUUID(self, gpu):
        return f"GPU-{gpu}abc"

    def nvmlDeviceGetName(self, gpu):
        return f"Model {gpu}"

    def nvmlSystemGetDriverVersion(self):
        return b"570.1"

    def _next(self, counter, gpu):
        values = self.script.get(counter, {}).get(gpu, [1])
        value = values.pop(0) if len(values) > 1 else values[0]
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=self._next("util", gpu))

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(used=self._next("memory", gpu))

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self._next("power", gpu)

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return self._next("temperature", gpu)


def sampler(nvml, visible=None, **kwargs):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return HardwareSampler(0, nvml=nvml, cpu_budget=2, environ=environ, **kwargs)


def test_gpu_counters_are_means_over_the_window():
    script = {"util": {0: [0, 50, 100, 80]}, "memory": {0: [2e9]}, "power": {0: [250_000, 350_000]}}
    machine = sampler(Nvml(**script, temperature={0: [60]}))
    for _ in range(3):
        machine.sample()
    window = machine.window()
    assert window["gpu/util_pct"] == 50 and window["gpu/mem_used_bytes"] == 2e9
    assert window["gpu/power_w"] == pytest.approx(950 / 3)
    assert window["gpu/temperature_c"] == 60
    machine.sample()
    assert machine.window()["gpu/util_pct"] == 80, "the window before is forgotten"
    assert "gpu/util_pct" not in machine.window(), "nothing was sampled"
    assert machine.cpu_s > 0
    assert machine.facts()["gpus"] == ["Model 0"] and machine.facts()["driver"] == "570.1"


def test_cpu_use_is_process_time_over_the_clock_and_the_budget():
    now = [100.0]
    machine = sampler(Nvml(0), clock=lambda: now[0])
    before = time.process_time()
    while time.process_time() - before < 0.2:
        pass
    now[0] += 0.4
    machine.sample()
    window = machine.window()
    # 0.2 CPU seconds in 0.4 seconds of the scripted clock, on two cores.
    assert window["cpu/util_pct"] == pytest.approx(25, rel=0.2)
    assert window["cpu/rss_bytes"] > 1e6 and 0 <= window["cpu/machine_util_pct"] <= 100
    now[0] += 10.0
    assert machine.window()["cpu/util_pct"] < 5, "the time axis is the clock's"


def test_a_failing_counter_loses_only_itself_and_says_so_once(caplog):
    machine = sampler(Nvml(util={0: [None]}, power={0: [1000, None]}))
    for _ in range(4):
        machine.sample()
    window = machine.window()
    assert "gpu/util_pct" not in window
    assert window["gpu/power_w"] == 1.0, "the one value before it failed"
    assert window["gpu/mem_used_bytes"] == 1
    assert caplog.text.count("gpu0/util_pct") == caplog.text.count("gpu0/power_w") == 1


@pytest.mark.parametrize("nvml", [Nvml(0), None])
def test_without_gpu_or_library_there_are_no_gpu_keys_and_no_noise(nvml, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import fails
    machine = sampler(nvml)
    machine.sample()
    assert not [key for key in machine.window() if key.startswith("gpu")]
    assert machine.facts()["gpus"] == [] and machine.facts()["ram_bytes"] > 0
    assert not caplog.text


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, [0, 1, 2]), ("2,0", [2, 0]), ("", []), ("-1", []), ("1,9,0", [1]),
        ("GPU-2abc,GPU-0", [2, 0]), ("MIG-1-5", [1]),
    ],
)  # fmt: skip
def test_only_gpus_that_cuda_may_use_are_read(visible, names):
    machine = sampler(Nvml(3), visible)
    assert machine.facts()["gpus"] == [f"Model {name}" for name in names]


def test_several_gpus_are_averaged_summed_and_told_apart():
    script = {"util": {0: [100], 1: [0]}, "memory": {0: [1e9], 1: [2e9]}}
    machine = sampler(Nvml(2, **script, temperature={1: [None]}))
    machine.sample()
    window = machine.window()
    assert window["gpu/util_pct"] == 50 and window["gpu/mem_used_bytes"] == 3e9
    assert window["gpu0/util_pct"] == 100 and window["gpu1/util_pct"] == 0
    assert window["gpu/temperature_c"] == 1 and "gpu1/temperature_c" not in window


def test_the_thread_samples_by_itself_until_closed():
    nvml = Nvml()
    machine = HardwareSampler(0.01, nvml=nvml, environ={})
    until(lambda: "gpu/util_pct" in machine.window(), 10, "a sample", every_s=0.02)
    machine.close()
    machine.close()
    machine.window()
    time.sleep(0.05)
    assert "cpu/rss_bytes" not in machine.window() and nvml.count == 0


def test_hardware_facts_name_the_cpu():
    assert hardware._cpu_model()


def test_provenance_of_a_repository_and_of_none(tmp_path):
    outside = provenance(tmp_path)
    assert outside["git"] is outside["dirty"] is outside["dirty_files"] is None
    assert outside["versions"]["mlflow"] and outside["versions"]["torch"]
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init"], [*who, "commit", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    clean = provenance(tmp_path)
    assert len(clean["git"]) == 40 and clean["dirty"] is False
    (tmp_path / "new.py").write_text("")
    dirty = provenance(tmp_path)
    assert dirty["dirty"] is True and dirty["dirty_files"] == ["new.py"]


def test_what_a_study_writes_does_not_make_its_code_another_one():
    results = ["experiments/replay/README.md", "experiments/replay/results/", "experiments/a/b.png"]
    others = ["README.md", "train.log"]
    code = ["experiments/replay/study.py", "conf/sweep/replay.yaml", "mine/", "and 7 more"]
    assert changed_code({"dirty_files": [*results, *others, *code]}) == code
    assert changed_code({"dirty_files": None}) == []


def test_provenance_imports_nothing_heavy():
    code = (
        "import sys, pathlib; from rl_pipeline.telemetry.provenance import provenance as p; "
        "p(pathlib.Path('.')); import rl_pipeline.tracking.tracker; "
        "sys.exit(bool({'torch', 'mlflow', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
