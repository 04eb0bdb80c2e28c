"""`make compare NEW=transformers==5.24.0`: what a release changes of what planc uses.

Reads sources alone; nothing of the release is imported. It is installed without its dependencies
in build/compare/NEW, and compared with the installed version:

- names that `planc/compat/` imports: those that are missing, or have other arguments;
- functions that planc replaces (test_replaced.py), with another body;
- of transformers the families that are new, gone, or keep other parameters in fp32, and words
  of their code that came or went;
- of torch the files of distributed/ that differ.

    python tests/compat/compare.py transformers==5.24.0
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_replaced import REPLACED, code_of

ROOT = Path(__file__).parents[2]
MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
ARGUMENT = re.compile(r"\b([a-z_]\w+)(?:: | ?= ?)")
KEPT = re.compile(r"_keep_in_fp32_modules(?:_strict)? = (\[[^\]]*\]|None)")


def imported_names(package):
    """`module:name` for each name of a package that planc/compat imports."""
    for path in sorted((ROOT / "planc" / "compat").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                yield from (f"{node.module}:{alias.name}" for alias in node.names)


def module_tree(site, module):
    """The AST of a module below a folder of packages, or None."""
    place = site.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    path = next((file for file in files if file.is_file()), None)
    return ast.parse(path.read_text(encoding="utf-8")) if path else None


def definition(site, name):
    """The node that defines `module:Class.method`, or that binds its name; None if absent."""
    module, _, path = name.partition(":")
    node = module_tree(site, module)
    for part in path.split("."):
        node = node and next((n for n in ast.walk(node) if part in bound_names(n)), None)
    return node


def bound_names(node):
    """The names that a statement binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names}
    return set()


def plain(node, *, arguments):
    """The code of a definition without docstrings, or its arguments alone."""
    if isinstance(node, ast.FunctionDef) and arguments:
        return ast.unparse(node.args)
    return "" if arguments else code_of(node)


def changed_names(old, new, names, *, arguments):
    """Yields a line for each name that a release lacks, or that differs."""
    for name in names:
        before, after = definition(old, name), definition(new, name)
        if before is not None and after is None:
            yield f"missing: {name}"
        elif before is not None and plain(before, arguments=arguments) != plain(
            after, arguments=arguments
        ):
            yield f"{'other arguments' if arguments else 'other body'}: {name}"


def causal_types(site):
    """The types of the causal language models of a transformers folder."""
    for module in ("auto_mappings", "modeling_auto"):
        tree = module_tree(site, f"transformers.models.auto.{module}")
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Assign) and MAPPING in bound_names(node):
                pairs = (n for n in ast.walk(node.value) if isinstance(n, ast.Tuple))
                return {pair.elts[0].value for pair in pairs if len(pair.elts) == 2}
    return set()


def kept_in_fp32(site, family):
    """The lists of parameters that a family keeps in fp32, as they are written."""
    files = sorted((site / "transformers" / "models" / family).glob("modeling_*.py"))
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sorted(" ".join(text.split()) for content in texts for text in KEPT.findall(content))


def argument_words(site, families):
    """How often the code of families names an argument or assigns a name."""
    found = Counter()
    for family in families:
        for file in (site / "transformers" / "models" / family).glob("modeling_*.py"):
            found.update(ARGUMENT.findall(file.read_text(encoding="utf-8")))
    return found


def changed_families(old, new):
    """Yields what changes of the models of transformers."""
    folders = [
        {path.name for path in (site / "transformers" / "models").iterdir() if path.is_dir()}
        for site in (old, new)
    ]
    types = causal_types(old), causal_types(new)
    yield f"new folders of models: {listed(folders[1] - folders[0])}"
    yield f"folders that are gone: {listed(folders[0] - folders[1])}"
    yield f"new causal language models: {listed(types[1] - types[0])}"
    yield f"causal language models that are gone: {listed(types[0] - types[1])}"
    words = (
        argument_words(old, folders[0] & folders[1]),
        argument_words(new, folders[0] & folders[1]),
    )
    for word in sorted({**words[0], **words[1]}):
        before, after = words[0][word], words[1][word]
        if max(before, after) >= 100 and min(before, after) * 10 < max(before, after):
            yield f"argument `{word}`: {before:,} places -> {after:,}"
    for family in sorted(folders[0] & folders[1]):
        before, after = kept_in_fp32(old, family), kept_in_fp32(new, family)
        if before != after:
            yield f"in fp32, {family}: {'; '.join(before)} -> {'; '.join(after)}"


def changed_files(old, new, folder):
    """Yields the Python files below a folder that differ, or that one of the two lacks."""
    names = {
        str(path.relative_to(site)) for site in (old, new) for path in (site / folder).rglob("*.py")
    }
    for name in sorted(names):
        texts = [(s / name).read_bytes() if (s / name).is_file() else b"" for s in (old, new)]
        if texts[0] != texts[1]:
            yield f"{'new' if not texts[0] else 'differs' if texts[1] else 'gone'}: {name}"


def listed(names):
    return ", ".join(sorted(names)) or "none"


def compare(package, old, new):
    """Yields a line for each change of a package between two folders of packages."""
    replaced = [name for name in REPLACED if name.split(".")[0] == package]
    yield from changed_names(old, new, imported_names(package), arguments=True)
    yield from changed_names(old, new, replaced, arguments=False)
    if package == "transformers":
        yield from changed_families(old, new)
    else:
        yield from changed_files(old, new, Path(package) / "distributed")


def installed(requirement):
    """A folder with a release and none of its dependencies."""
    folder = ROOT / "build" / "compare" / requirement
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), requirement], check=True)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", help="a requirement, such as transformers==5.24.0")
    parser.add_argument("--folder", type=Path, help="with the release, if it is there already")
    asked = parser.parse_args()
    package = asked.release.partition("==")[0]
    old = Path(find_spec(package).origin).parents[1]
    print(*compare(package, old, asked.folder or installed(asked.release)), sep="\n")


if __name__ == "__main__":
    main()
