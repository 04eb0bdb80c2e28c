"""Files around the compiler: those that ship with it, a project's planc.toml, atomic writes."""
