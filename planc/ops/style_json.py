"""Styles as the JSON of a lowered plan has them, both ways."""

from __future__ import annotations

from typing import Any

from planc.ops import styles as ir


def style_data(style: ir.Style) -> dict[str, Any]:
    """A style as the JSON of a lowered plan has it; what is as it mostly is stays out."""
    body: dict[str, Any] = {"name": ir.style_name(style)}
    match style:
        case ir.Replicated():
            return {**body, "gradient": "sum"}  # any other is not lowered
        case ir.MlaKv():
            return {**body, "rope": style.rope}
        case ir.Features():
            return body
        case ir.Attributes():
            return {**body, "attributes": list(style.names)}
        case ir.Custom():
            given = {name: _plain(value) for name, value in style.arguments}
            return {"name": "python", "style": style.name, "path": style.path, "arguments": given}
        case ir.Parameters() | ir.Experts():
            if isinstance(style, ir.Experts):
                body |= {"input": str(style.input), "output": str(style.output)}
                body |= {} if style.local else {"local": False}
            return {**body, "parameters": {name: _held(h) for name, h in style.held}}
        case ir.Colwise() | ir.Rowwise():
            body |= {"input": str(style.input), "output": str(style.output)}
            body |= _packing(style) | ({"transposed": True} if style.transposed else {})
        case ir.Sequence():
            body |= {"dim": style.dim}
        case ir.Input():
            body |= {
                "positional": [_change(c) for c in style.positional],
                "named": {name: _change(c) for name, c in style.named},
            }
        case ir.Output():
            body |= {"positional": [_change(c) for c in style.positional]}
    return {**body, "local": style.local}


def _plain(value: ir.Literal) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def _held(held: ir.Held) -> dict[str, Any]:
    return {"layout": str(held.layout), **_packing(held)}


def _packing(style: ir.Colwise | ir.Rowwise | ir.Held) -> dict[str, Any]:
    """What is not as it mostly is: such a field is left out, so that digests stay."""
    parts = list(style.parts) if isinstance(style.parts, tuple) else style.parts
    body: dict[str, Any] = {} if parts == 1 else {"parts": parts}
    return {**body, "interleaved": True} if style.interleaved else body


def _change(change: ir.Change | None) -> list[str] | None:
    return [str(change.source), str(change.target)] if change else None


# Reading -----------------------------------------------------------------------------------------


def read_style(data: dict[str, Any]) -> ir.Style:
    """The style that `style_data` wrote."""
    local = bool(data.get("local"))
    match data["name"]:
        case "colwise" | "rowwise" as name:
            kind = ir.Colwise if name == "colwise" else ir.Rowwise
            one, two = _read_layout(data["input"]), _read_layout(data["output"])
            turned = data.get("transposed", False)
            return kind(
                input=one, output=two, local=local, transposed=turned, **_read_packing(data)
            )
        case "replicate":
            return ir.Replicated(summed=data["gradient"] == "sum")
        case "mla_kv":
            return ir.MlaKv(rope=data["rope"])
        case "features":
            return ir.Features()
        case "attributes":
            return ir.Attributes(names=tuple(data["attributes"]))
        case "python":
            given = tuple((n, _frozen(v)) for n, v in data["arguments"].items())
            return ir.Custom(name=data["style"], path=data["path"], arguments=given)
        case "parameters":
            return ir.Parameters(held=_read_held(data))
        case "experts":
            one, two = _read_layout(data["input"]), _read_layout(data["output"])
            kept = data.get("local", True)
            return ir.Experts(held=_read_held(data), input=one, output=two, local=kept)
        case "sequence":
            return ir.Sequence(dim=data["dim"], local=local)
        case "input":
            named = tuple((n, _read_pair(c)) for n, c in data["named"].items())
            return ir.Input(positional=_read_changes(data), named=named, local=local)
        case _:
            return ir.Output(positional=_read_changes(data), local=local)


def _read_held(data: dict[str, Any]) -> tuple[tuple[str, ir.Held], ...]:
    return tuple(
        (name, ir.Held(layout=_read_layout(held["layout"]), **_read_packing(held)))
        for name, held in data["parameters"].items()
    )


def _read_packing(data: dict[str, Any]) -> dict[str, Any]:
    parts = data.get("parts", 1)
    return {
        "parts": tuple(parts) if isinstance(parts, list) else parts,
        "interleaved": data.get("interleaved", False),
    }


def _read_changes(data: dict[str, Any]) -> tuple[ir.Change | None, ...]:
    return tuple(None if c is None else _read_pair(c) for c in data["positional"])


def _read_pair(pair: list[str]) -> ir.Change:
    return ir.Change(_read_layout(pair[0]), _read_layout(pair[1]))


def _read_layout(text: str) -> ir.Layout:
    if text == "replicate":
        return ir.Replicate()
    if text == "partial":
        return ir.Partial()
    return ir.Shard(int(text.removeprefix("shard(").removesuffix(")")))
