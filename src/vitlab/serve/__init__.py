"""A server that holds: pictures over HTTP -> what `vitlab predict`, `zeroshot` and the like would say of them.

    from vitlab.serve.app import create_app
    from vitlab.serve.model_pool import open_models

    app = create_app(open_models(["bundled:digits"]))        # an ASGI application; `vitlab serve` runs it

A request goes: guard (host, origin, token) -> upload (size, kind) -> decoded in a thread -> queue of its model ->
a batch in the model's own thread -> answer. Whatever is refused is refused at the first of these that can tell.
"""
