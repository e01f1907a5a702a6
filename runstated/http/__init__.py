"""The hosted service's HTTP API, for programs in any language: a table from endpoints to requests of the wire.

    uvicorn, in the daemon's loop ─ app.py ─ endpoint functions (runs.py, once.py, ...) ─ gateway.py ─ engine
                                              └ waiters.py: calls that wait and are polled by an id

No rule lives here. Resource, timer and barrier ids are made of their names, so that they mean the same after a restart.
"""
