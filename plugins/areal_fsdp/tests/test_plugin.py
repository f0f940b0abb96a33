import subprocess
import sys


def test_the_record_names_what_exists():
    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.engine import FSDPEngine
    from areal_fsdp.plugin import areal_train_engines

    (component,) = areal_train_engines()
    assert component.target == f"{FSDPEngine.__module__}:{FSDPEngine.__name__}"
    assert component.config == f"{FSDPConfig.__module__}:{FSDPConfig.__name__}"


def test_record_and_config_import_no_torch():
    code = "import sys, areal_fsdp.plugin, areal_fsdp.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
