"""Runs a program as Python does, `FILE` or `-m MODULE`, and closes the ports of its process groups.

The main program of a process (`launch("train.py")`), so it imports nothing before the import path is the program's.
"""


def _main() -> None:
    import sys

    kind, name, *args = sys.argv[1:]
    is_safe = getattr(sys.flags, "safe_path", False)
    if not is_safe:
        del sys.path[0]  # this file's folder, or the working folder
    import importlib.util
    import os
    import runpy

    class Hook:
        """Finds the module of torch that makes process groups, and changes it when it has been imported."""

        @staticmethod
        def find_spec(found: str, path: object = None, target: object = None) -> object:
            if found != "torch.distributed.distributed_c10d":
                return None
            sys.meta_path.remove(Hook)  # type: ignore[arg-type]
            spec = importlib.util.find_spec(found)
            assert spec is not None
            assert spec.loader is not None
            run = spec.loader.exec_module

            def run_and_change(module: object) -> None:
                run(module)  # type: ignore[arg-type]
                try:
                    from spark_dl.launch.rank.ports import close_when_connected
                except ImportError:  # the program has removed its path
                    return
                close_when_connected()

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Hook)  # type: ignore[arg-type]
    sys.argv[:] = [name, *args]
    if not is_safe:
        sys.path.insert(0, os.path.dirname(name) if kind == "file" else os.getcwd())
    main = sys.modules["__main__"].__dict__
    for own in ("_main", "__cached__"):
        main.pop(own, None)
    if kind == "module":
        runpy._run_module_as_main(name)  # type: ignore[attr-defined] # as `python -m` does
        return
    main.update(__file__=name, __doc__=None, __spec__=None)
    with open(name, "rb") as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)
    exec(code, main)  # noqa: S102 - the user's program


if __name__ == "__main__":
    _main()
