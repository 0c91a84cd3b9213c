"""The exercises step by step, with every common mistake as a variant.

The default variants are the papers' equations, equal to the layers of this package. Any other value is a known mistake
whose numbers can be compared with a learner's. All have the signature (weights, *inputs, sizes, variant, note) ->
output.
"""
