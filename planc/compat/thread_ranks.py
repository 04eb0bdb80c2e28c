"""A process group whose ranks are threads; its import takes long."""

from planc.compat.names import private_names, require, require_assigned

with private_names("torch"):
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed import multi_threaded_pg
    from torch.testing._internal.distributed.multi_threaded_pg import Collective, ret_work

require("torch", _distributed_c10d, "_set_thread_isolation_mode")
require(
    *("torch", multi_threaded_pg, "_install_threaded_pg", "_uninstall_threaded_pg"),
    "_store_based_barrier",
)
require(
    *("torch", multi_threaded_pg.ProcessLocalGroup, "_start_coll", "_terminate"),
    *("exception_handle", "reset"),
)
require_assigned(
    *("torch", Collective, "_collective", "_count", "_data"),
    *("_done", "_start_cond", "_world_size"),
)


__all__ = ["multi_threaded_pg", "ret_work"]
