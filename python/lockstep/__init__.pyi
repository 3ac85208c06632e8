from types import ModuleType

from lockstep._diloco import DiLoCo as DiLoCo
from lockstep._optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
from lockstep._replica import Error as Error, Replica as Replica, attach as attach

__version__: str

def register() -> None: ...
def _extension() -> ModuleType: ...
