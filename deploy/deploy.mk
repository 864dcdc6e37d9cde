# Targets of deploy/: included by the Makefile.
.PHONY: deploy-tools deploy-test image-test screenshots dashboards

$(VENV)/checkov: | $(PY)  # has dependencies of its own that would fight with ours
	@$(PY) -m venv $@ && $@/bin/python -m pip install -qq --disable-pip-version-check checkov==3.3.30 || { rm -rf $@; exit 1; }

deploy-tools: $(DEV) $(VENV)/checkov
	@command -v promtool >/dev/null && command -v prometheus >/dev/null && command -v chromium >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends prometheus chromium >/dev/null; } || \
	  echo "prometheus and chromium are not installed: their tests will be skipped" >&2

deploy-test: deploy-tools ## charts, manifests, rules, dashboards, node page: against real tools
	$(PY) -m pytest tests/deploy tests/observe -rs $(ARGS)

image-test: $(DEV) ## build the image without a network, run it read-only, scrape it (root, buildah, podman)
	deploy/image_test.sh

screenshots: deploy-tools ## node page and a Prometheus graph under load, into screenshots/
	PYTHONPATH=.:proto:server:client $(PY) -m tests.deploy.screenshots

dashboards: $(DEV) ## regenerate dashboards, kustomize and what the chart copies
	$(PY) deploy/dashboards.py
	$(PY) tools/metrics_doc.py
	$(PY) deploy/values_schema.py
	$(PY) deploy/render.py

.PHONY: clean-deploy
clean: clean-deploy
clean-deploy:
	rm -rf .image screenshots
