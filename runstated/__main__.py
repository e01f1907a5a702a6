"""`python -m runstated`, and the hidden first step of a daemon in the background."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["detached"]:
        detached(*sys.argv[2:])
    from runstated.main import main as command

    command()


def detached(descriptor: str, options: str) -> None:
    """Become the daemon that `runstate.spawn` asked for, and never return.

    `descriptor` is the readiness pipe, `options` a JSON object of settings. The fork comes first: our parent waits for
    this process and must not be kept, and the child, which leads no session, can never get a terminal again. The
    command line interface is not imported: it would double the time to start.
    """
    import os

    if os.fork() > 0:
        os._exit(0)
    import json
    import signal

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # what whoever came first ignores must not matter

    pipe = int(descriptor)
    os.set_inheritable(pipe, False)

    def answer(**content: object) -> None:
        try:
            os.write(pipe, json.dumps(content).encode() + b"\n")
        except BrokenPipeError:
            pass  # whoever started us has left; the daemon is there for the next one
        os.close(pipe)

    started = False

    def ready() -> None:
        nonlocal started
        started = True
        answer(pid=os.getpid())

    try:
        from dataclasses import replace

        from runstated import daemon, settings
        from runstated.host import inherited

        remains = inherited.reset()  # before there are threads, each of which would keep its own
        daemon.serve(replace(settings.load(json.loads(options)), inherited=remains), ready, foreground=False)
    except Exception as error:
        if not started:
            answer(error=str(error) or repr(error), held=type(error).__name__ == "LockHeld")
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
