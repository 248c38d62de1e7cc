# `make demo` and `make test` do all their own set-up on a fresh Debian or Ubuntu machine; see CONTRIBUTING.md.
.PHONY: help demo test lint format tidy wheel wheel-arm64 debug-symbols image roots site clean

help:
	@echo "make demo    two programs share a GPU (a simulated one where there is none): table and plot in demo-out/"
	@echo "make test    lint, C++ tests (plain, ASan and UBSan, TSan), Python tests on every Python found, packaging"
	@echo "make lint    ruff, mypy, clang-format and shell syntax"
	@echo "make format  rewrite the sources as lint wants them"
	@echo "make tidy    clang-tidy over csrc (minutes)"
	@echo "make wheel   a wheel in dist/ for Linux with glibc 2.34 or later"
	@echo "make wheel-arm64  the same for arm64, by a cross compiler"
	@echo "make roots   new roots of Debian and Ubuntu, as root: a wheel is installed and the demo runs in each"
	@echo "make debug-symbols  a wheel in dist/ and the debug information of its libraries in dist/debug/"
	@echo "make image   an image of cudasched with buildah, as root; the simulated demo runs in it"
	@echo "make site    the documents and the reference as a site in build/site; links that lead nowhere are errors"
	@echo "make clean   remove what the above built"

demo:
	@scripts/demo.sh

test:
	@scripts/test.sh

lint:
	@scripts/lint.sh

format:
	@scripts/lint.sh --fix

tidy:
	@scripts/tidy.sh

wheel:
	@scripts/wheel.sh

wheel-arm64:
	@scripts/wheel.sh arm64

debug-symbols:
	@scripts/debug-symbols.sh

image:
	@scripts/image.sh demo

roots:
	@scripts/roots.sh

site:
	@scripts/site.sh

clean:
	rm -rf build dist demo-out .venv .venv-3.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
