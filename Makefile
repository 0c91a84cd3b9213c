# make run    install what running needs, show the anatomy of ViT-B/16, train on the embedded digits, evaluate; what a ViT says of a cat, and why
# make test   add the tools for developing, run the tests
# make check  style, types, import contract
# make docs   build the documentation site, in build/site; a broken link or reference fails. npm brings the page into it
# make dist   build the sdist and the wheel, and try the wheel in an empty environment
# make bench  measure speed against transformers, and digits (takes minutes; run nothing else meanwhile)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready-run
READY_DEV := .venv/.ready-dev
RUN := runs/digits-$(shell date +%Y%m%d-%H%M%S)

.PHONY: run test check docs dist bench setup setup-dev browser clean

run: setup
	@$(BIN)/vitlab inspect vit_base
	@echo
	@echo "This was the anatomy of ViT-B/16: every step of its forward pass, with the tensor's shape, its parameters and MACs."
	@echo "Now a small ViT learns scikit-learn's 8 x 8 digits, which are in the package; it takes about a minute."
	@echo
	@$(BIN)/vitlab train digits run.dir=$(RUN)
	@$(BIN)/vitlab eval $(RUN)/best digits
	@echo
	@echo "Open its report in a browser: $(RUN)/report.html"
	@echo "A larger ViT is in the package. What does it say of a cat, and why?"
	@echo
	@$(BIN)/vitlab try --no-serve --out $(RUN)/cat.png
	@echo
	@echo "Now a photo of yours, on a page to explore: $(BIN)/vitlab try PHOTO"

# Some tests start processes: the empty variable lets them share compiled files, where a machine forbids to write those.
test: setup-dev browser
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: setup-dev
	$(BIN)/sphinx-build -q -W --keep-going -E -c docs/site docs build/site
	@echo "site: build/site/index.html"

dist:
	$(PYTHON) tools/release.py

bench: setup-dev
	$(BIN)/python benchmarks/inference.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/recipes.py digits

setup: $(READY)
setup-dev: $(READY_DEV)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) tools/setup_venv.py
	@touch $(READY)

$(READY_DEV): pyproject.toml constraints.txt constraints-dev.txt
	$(PYTHON) tools/setup_venv.py --dev
	@touch $(READY) $(READY_DEV)

# The pages are tested in Chromium, and drawings with a Chinese font. Without them, and without the right to install
# them, those tests are skipped and say so.
browser:
	@missing=fonts-wqy-microhei; \
	if find /usr/share/fonts /usr/local/share/fonts $$HOME/.fonts /Library/Fonts /System/Library/Fonts 2>/dev/null \
		| grep -Eiq 'cjk|hansans|notosanssc|wqy|simhei|msyh|pingfang|hiragino'; then missing=; fi; \
	command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null || missing="$$missing chromium"; \
	if [ -z "$$missing" ]; then exit; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else false; fi || echo "Cannot install $$missing here: the tests that need it will be skipped."

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
