"""Device meshes: axes that are joined and divided."""

from planc.compat.names import private_names, require

with private_names("torch"):
    from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
    from torch.distributed.device_mesh import DeviceMesh

require("torch", DeviceMesh, "_concatenate", "_unflatten")
require("torch", _FlatLayout, "composition")
require("torch", _MeshLayout, "collapse", "from_sizes_strides", "splice")

__all__ = ["DeviceMesh"]
