from areal_core.library import Run as Run
from areal_core.library import Table as Table
from areal_core.library import open_run as open_run
from areal_core.library import train as train

__version__: str
