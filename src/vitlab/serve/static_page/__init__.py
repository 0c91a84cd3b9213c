"""The page without a server: a folder of HTML, JavaScript and ONNX graphs that any file server can host.

    from vitlab.serve.static_page.build import build_page

    build_page("site", ["bundled:cifar10"])                  # as `vitlab page build site bundled:cifar10`

graphs.py says what the browser computes, onnx_files.py writes it, verify.py compares it with the library before it is
kept; runtime.py fetches onnxruntime-web; browser/ holds the JavaScript that stands in for the server.
"""
