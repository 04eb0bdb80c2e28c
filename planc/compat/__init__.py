"""Names of torch, transformers and other libraries that no release promises, one file a part.

Other folders import private names from here, and the classes whose private attributes they use. The
import of a file looks for all of its names, and refuses a library that lacks one (PL743). Emitted
scripts import the same names from the library itself.
"""
