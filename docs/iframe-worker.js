/* Search on pages opened from the disk, where browsers refuse workers: the worker's script runs in a hidden frame. */
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inside = frame.contentWindow;
      const page = this.inside.document;
      page.open();
      page.write("<body></body>");
      page.close();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      this.loaded = new Promise((done) => script.addEventListener("load", done));
      script.src = new URL(url, document.baseURI);
      page.body.appendChild(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  };
