/* Browsers start no workers for pages that are read from files. There, this class stands in for Worker: it runs the
   script of the site's search in a frame. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = (this.inside = frame.contentWindow)
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = new URL(url, location.href).href
      this.loaded = new Promise(resolve => (script.onload = resolve))
      inside.document.body.appendChild(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })))
    }
  }
