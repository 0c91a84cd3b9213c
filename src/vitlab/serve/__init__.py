"""HTTP server: images in, the results of `vitlab predict`, `zeroshot` and the like out.

    from vitlab.serve.app import create_app
    from vitlab.serve.model_pool import open_models
    from vitlab.serve.run import open_server

    open_server(["bundled:digits"], port=8000).run()         # as `vitlab serve`
    app = create_app(open_models(["bundled:digits"]))        # an ASGI application

A request passes: guard (host, origin, token) -> upload (size, format) -> decoder pool -> the model's queue -> a batch
in the executor -> response. Each stage refuses what it can, so that no later stage sees it.
"""
